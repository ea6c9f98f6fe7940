"""Connections to the gateway, shared by the clients of all episodes."""

from __future__ import annotations

import asyncio
from typing import Any

_clients: dict[tuple[asyncio.AbstractEventLoop, type[Any]], Any] = {}


def sharing_client(client_class: type[Any]) -> Any:
    """An asynchronous HTTP client that sends over the running event loop's one client of the same class.

    Closing it leaves the connections open for the others. With connections of its own, each episode would cost 20 ms of
    processor time for a TLS context, and, where a framework never closes its client, a file descriptor until the
    gateway gives the idle connection up.

    Args:
        client_class: an SDK's own subclass of `AsyncClient`. Which package that is from (httpx, httpx2) is its affair.
    """
    return client_class(transport=_Shared(client_class))


class _Shared:
    """A transport, as both packages define it."""

    def __init__(self, client_class: type[Any]) -> None:
        self._client_class = client_class

    async def handle_async_request(self, request: Any) -> Any:
        return await _of_running_loop(self._client_class).send(request, stream=True)

    async def __aenter__(self) -> _Shared:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def aclose(self) -> None:
        pass


def _of_running_loop(client_class: type[Any]) -> Any:
    key = asyncio.get_running_loop(), client_class
    if key not in _clients:
        for known in list(_clients):
            if known[0].is_closed():
                _clients.pop(known, None)
        # The gateway is in this very process: whatever proxies the environment names are not on the way.
        _clients[key] = client_class(trust_env=False)
    return _clients[key]
