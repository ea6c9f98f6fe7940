"""What any engine refuses: a bad request must not reach the others' batch."""

from __future__ import annotations

import json

from agentrl.record import EngineError, GuideError
from agentrl.record.protocols import GenerateRequest


def check_request(request: GenerateRequest, *, version: int, max_model_len: int, vocabulary: int) -> None:
    """Raises EngineError for a request that an engine with these weights and limits can't serve.

    GuideError is for one whose JSON schema is none.
    """
    ids = request.token_ids
    if request.min_version > version:
        raise EngineError(f"asked for version {request.min_version}, but the engine is at {version}")
    if len(ids) + request.max_tokens > max_model_len or not len(ids):
        raise EngineError(
            f"prompt of {len(ids)} and max_tokens {request.max_tokens} do not fit into "
            f"rollout.max_model_len {max_model_len}"
        )
    if request.max_tokens < 1:
        raise EngineError(f"max_tokens is {request.max_tokens}: ask for at least one token")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise EngineError(
            f"the prompt holds token ids from {ids.min()} to {ids.max()}, the model has {vocabulary} tokens"
        )
    if not 0 <= request.temperature < float("inf"):
        raise EngineError(f"temperature is {request.temperature}: use 0 (greedy) or a positive number")
    if not 0 < request.top_p <= 1:
        raise EngineError(f"top_p is {request.top_p}: use a number above 0 and up to 1 (all tokens)")
    if request.top_k != -1 and request.top_k < 1:
        raise EngineError(f"val.top_k is {request.top_k}: use a positive number, or -1 (all tokens)")
    if not all(request.stop):
        raise EngineError("one of the stop texts is empty: every turn would end at once")
    if request.json_schema:
        _check_guided(request)


def _check_guided(request: GenerateRequest) -> None:
    try:
        schema = json.loads(request.json_schema)
    except (ValueError, RecursionError) as error:
        raise GuideError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GuideError(f"the JSON schema is {request.json_schema:.60}: use an object, such as {{}} for any value")
    if not request.stop_token_ids:
        raise EngineError("json_schema without stop_token_ids: ask for the token that ends the turn after the value")
    if request.stop:
        raise EngineError(f"json_schema with the stop texts {request.stop}: they would cut the value, ask without them")
