"""vLLM's own HTTP server as an engine: started by somebody else, on this machine or another one.

It has to run with `VLLM_SERVER_DEV_MODE=1`, which opens the endpoints for weights, and with agentrl installed beside
it, whose weight transfer its workers load; docs/engines.md has the whole command line.
"""

from __future__ import annotations

from typing import Any

from agentrl.config import RunConfig
from agentrl.engine.engine_server import EngineServer
from agentrl.engine.vllm_engine import VllmAnswer, VllmCounters, VllmEngine, sampling_parameters
from agentrl.record import EngineDied, EngineError, GuideError
from agentrl.record.protocols import GenerateRequest, PauseMode

_METRICS = {
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
_HEALTH_SECONDS = 30.0
_MOST_FAILURES = 3


class VllmServer:
    """Implements `vllm_engine.VllmClient` over HTTP."""

    def __init__(self, url: str) -> None:
        self._server = EngineServer(url, not_found="start it with VLLM_SERVER_DEV_MODE=1 (docs/engines.md)")
        self._unhealthy = 0

    async def generate(self, request: GenerateRequest) -> VllmAnswer:
        body = {
            "request_id": request.request_id,
            "token_ids": request.token_ids.tolist(),
            "sampling_params": sampling_parameters(request),
        }
        # Whatever else could be wrong with a request was checked before.
        refusal = GuideError if request.json_schema else EngineError
        answer = await self._server.json("/inference/v1/generate", body, refusal=refusal)
        try:
            (choice,) = answer["choices"]
            content = (choice.get("logprobs") or {}).get("content") or ()
            spans = [(span["start"], span["end"], span["version"]) for span in choice.get("weight_versions") or ()]
            logprobs = [token["logprob"] for token in content]
            return VllmAnswer(choice["token_ids"] or (), logprobs, spans, choice["finish_reason"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._server.url} gave no answer to request {request.request_id}: {answer!r:.500}"
            ) from error

    async def abort(self, request_ids: list[str]) -> None:
        if request_ids:  # none would mean all
            # The server puts its own word before the ids of this endpoint.
            await self._post("/abort_requests", {"request_ids": [f"generate-tokens-{name}" for name in request_ids]})

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def resume(self) -> None:
        await self._post("/resume")

    async def sleep(self, level: int) -> None:
        await self._post(f"/sleep?level={level}")

    async def wake_up(self) -> None:
        await self._post("/wake_up")

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": info})

    async def start_weight_update(self) -> None:
        await self._post("/start_weight_update")

    async def update_weights(self, info: dict[str, Any]) -> None:
        await self._post("/update_weights", {"update_info": info})

    async def finish_weight_update(self, version: str) -> None:
        await self._post("/finish_weight_update", {"weight_version": version})

    async def set_version(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version})

    async def reset_prefix_cache(self) -> None:
        await self._post("/reset_prefix_cache?reset_running_requests=true")

    async def weight_checksums(self) -> list[dict[str, str]]:
        return [(await self._post("/weight_checker", {"action": "checksum"}))["checksums"]]

    async def check_health(self) -> None:
        try:
            await self._server.call("/health", seconds=_HEALTH_SECONDS)
            self._unhealthy = 0
        except EngineDied:
            raise
        except EngineError as error:
            self._unhealthy += 1
            if self._unhealthy >= _MOST_FAILURES:
                raise EngineDied(f"{self._server.url} is not well: {error}") from error

    async def counters(self) -> VllmCounters:
        counters = VllmCounters()
        for line in (await self._server.call("/metrics")).splitlines():
            name, _, value = line.rpartition(" ")
            field = _METRICS.get(name.partition("{")[0])
            if field is not None:
                setattr(counters, field, getattr(counters, field) + int(float(value)))
        return counters

    async def workers(self) -> int:
        """Processes that hold the model's weights."""
        return int((await self._server.json("/get_world_size"))["world_size"])

    async def limits(self) -> tuple[str, int]:
        """The model's name, and the longest sequence that the server takes."""
        (model, *_) = (await self._server.json("/v1/models"))["data"]
        return model["id"], int(model["max_model_len"])

    async def close(self) -> None:
        await self._server.close()

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._server.json(path, {} if body is None else body)


async def connect_vllm_server(config: RunConfig, url: str) -> VllmEngine:
    """An engine that is a server at `url`.

    Raises:
        EngineError: it does not answer, or was started without what training needs.
    """
    server = VllmServer(url)
    try:
        name, longest = await server.limits()
        if longest < config.rollout.max_model_len:
            raise EngineError(
                f"{url} serves {name} with --max-model-len {longest}, below rollout.max_model_len = "
                f"{config.rollout.max_model_len}"
            )
        engine = VllmEngine(
            server,
            max_model_len=config.rollout.max_model_len,
            vocabulary=2**31 - 1,  # which only the server knows, and checks
            keeps_cache=config.rollout.kv_on_update == "keep",
            workers=await server.workers(),
        )
        await engine.resume()
        await engine.start()
    except BaseException:
        await server.close()
        raise
    return engine
