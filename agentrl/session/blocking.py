"""A session for plain functions: calls that block a thread instead of being awaited."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agentrl.record import EpisodeClosed
from agentrl.session.session import Session

T = TypeVar("T")


class BlockingPolicy:
    """A session for a plain `run` in a thread (`sdk.SyncPolicy`)."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop
        self._calls: set[concurrent.futures.Future[Any]] = set()

    def cancel(self) -> None:
        """Ends the calls that a thread still waits for: its episode is over."""
        for call in list(self._calls):
            call.cancel()

    @property
    def base_url(self) -> str:
        return self._wait(self._of_session("base_url"))

    @property
    def api_key(self) -> str:
        return self._wait(self._of_session("api_key"))

    @property
    def model(self) -> str:
        return self._wait(self._of_session("model"))

    def chat(self, messages: Any, tools: Any = None, *, max_tokens: int | None = None, stop: Any = None) -> Any:
        return self._wait(self._session.chat(messages, tools, max_tokens=max_tokens, stop=stop))

    def generate(self, token_ids: Any, *, max_tokens: int | None = None, stop: Any = None) -> Any:
        return self._wait(self._session.generate(token_ids, max_tokens=max_tokens, stop=stop))

    def reward(self, value: float, turn: int | None = None) -> None:
        self._session.reward(value, turn)

    async def _of_session(self, name: str) -> str:
        return getattr(self._session, name)

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError as error:
            call.close()
            raise EpisodeClosed(f"episode {self._session.episode_id} has ended") from error
        self._calls.add(answer)
        try:
            return answer.result()
        except concurrent.futures.CancelledError:
            raise EpisodeClosed(f"episode {self._session.episode_id} has ended") from None
        finally:
            self._calls.discard(answer)


async def in_thread(function: Callable[[], T]) -> T:
    """Runs a plain function in a thread that does not keep the process alive if it never returns."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  handed to the awaiting task
            # No future takes a StopIteration, and a SystemExit would end the event loop.
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            outcome: tuple[Callable[[Any], None], Any] = (
                future.set_exception,
                error if plain else RuntimeError(f"{type(error).__name__}: {error}"),
            )
        else:
            outcome = (future.set_result, result)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="agent-run", daemon=True).start()
    return await future
