"""What agentrl says to SGLang's HTTP server and what it makes of the answers; also the server's command line.

Written against SGLang 0.5.23. `tests/engine/test_sglang_contract.py` gives all of it to SGLang's own request classes.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config import RunConfig
from agentrl.config.names import ENGINE_ARGUMENTS
from agentrl.engine.continuation import Part
from agentrl.record import EngineError, WeightTransferError
from agentrl.record.protocols import Bucket, GenerateRequest, WeightGroup

CONTEXT_MARGIN = 8
"""Tokens by which the server's context is longer than `rollout.max_model_len`: SGLang refuses prompts up to 6 tokens
below the end of its context, and cuts answers 2 tokens before it without a word."""


def generate_payload(request: GenerateRequest, rid: str) -> dict[str, Any]:
    """Body of `/generate`.

    The seed matters to servers with `enable_deterministic_inference`; others draw from one generator of their own.

    Args:
        rid: the server's name of the request. It aborts all whose name begins with the one it is given, so no name may
            begin another one.
    """
    return {
        "rid": rid,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "sampling_seed": request.seed,
            "stop_token_ids": list(request.stop_token_ids),
            "stop": list(request.stop),
            # `ignore_eos` also ignores `stop_token_ids`. With them the model's own end of sequence ends an answer too:
            # `read_answer` tells such an end from one that was asked for.
            "ignore_eos": not request.stop_token_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **({"json_schema": request.json_schema} if request.json_schema else {}),
        },
        "return_logprob": True,
        "stream": False,
    }


def read_answer(request: GenerateRequest, answer: Any) -> Part:
    """What `/generate` answered, checked to be complete.

    Raises:
        EngineError: tokens, log-probs or versions are missing or do not fit together.
    """
    try:
        meta = answer["meta_info"]
        tokens = np.asarray(answer["output_ids"], np.int32)
        pairs = meta.get("output_token_logprobs") or []
        logprobs = np.asarray([pair[0] for pair in pairs], np.float32)
        sampled = np.asarray([pair[1] for pair in pairs], np.int32)
        spans = [(span["start"], span["end"], span["version"]) for span in meta.get("weight_versions") or ()]
        reason, matched = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"SGLang gave no answer to request {request.request_id}: {answer!r:.500}") from error
    if not np.array_equal(tokens, sampled) or not np.isfinite(logprobs).all():
        raise EngineError(
            f"SGLang reports {len(pairs)} log-probs for the {len(tokens)} tokens of request {request.request_id}, "
            "some of other tokens or not finite"
        )
    versions = _versions(request, spans, len(tokens))
    if reason == "length":
        return Part(tokens, logprobs, versions, "length")
    if reason == "stop" and isinstance(matched, str) and matched not in request.stop:
        raise EngineError(f"SGLang ended request {request.request_id}: {matched}")
    if reason == "stop":
        # Otherwise it is the model's own end of sequence, which the request did not name: the answer goes on, unless it
        # is guided. Then it is whole.
        asked = isinstance(matched, str) or matched in request.stop_token_ids or bool(request.json_schema)
        return Part(tokens, logprobs, versions, "stop" if asked else "interrupted")
    if reason == "abort":
        return Part(tokens, logprobs, versions, "interrupted")
    raise EngineError(f"SGLang ended request {request.request_id} with {reason!r}")


def _versions(request: GenerateRequest, spans: list[tuple[Any, Any, Any]], count: int) -> np.ndarray:
    versions = np.full(count, -1, np.int32)
    try:
        for start, end, version in spans:
            versions[start:end] = int(version)
    except (TypeError, ValueError) as error:
        raise EngineError(f"SGLang's weight versions are not agentrl's: {spans!r:.300}") from error
    if (versions < 0).any():
        raise EngineError(
            f"SGLang does not say which weights sampled the tokens of request {request.request_id}: it has to be a "
            "version that reports weight_versions (0.5.23 does)"
        )
    return versions


def disk_payload(folder: Path, version: int) -> dict[str, Any]:
    """Body of `/update_weights_from_disk`. The cache is flushed apart from it, so that a refusal can be tried again."""
    return {
        "model_path": str(folder),
        "weight_version": str(version),
        "flush_cache": False,
        "abort_all_requests": False,
    }


def version_payload(version: int) -> dict[str, Any]:
    """Body of `/update_weight_version`, which ends all running requests unless told not to."""
    return {"new_version": str(version), "abort_all_requests": False}


def group_payload(group: WeightGroup) -> dict[str, Any]:
    """Body of `/init_weights_update_group`. SGLang adds each worker's tensor parallel rank to the offset."""
    host, _, port = group.address.rpartition(":")
    return {
        "master_address": host,
        "master_port": int(port),
        "rank_offset": group.rank,
        "world_size": group.world_size,
        "group_name": group.name,
        "backend": group.backend,
    }


def bucket_payload(bucket: Bucket, group: str) -> dict[str, Any]:
    """Body of `/update_weights_from_distributed` for a bucket that comes as one flat buffer.

    Raises:
        WeightTransferError: SGLang, which is told only names, types and shapes, would look for the bytes elsewhere.
    """
    import torch

    offset = 0
    for piece in bucket.slices:
        itemsize = getattr(torch, piece.dtype).itemsize
        whole = piece.tensor_offset == 0 and piece.nbytes == int(np.prod(piece.shape, dtype=np.int64)) * itemsize
        if not whole or piece.bucket_offset != offset or offset % itemsize:
            raise WeightTransferError(
                f"bucket {bucket.index}: {piece.name} lies at byte {piece.bucket_offset} where SGLang looks for it at "
                f"{offset}, or only in part: send to SGLang with BucketLayout(alignment=1, split=False), and tensors "
                "of one type in each bucket"
            )
        offset += piece.nbytes
    if offset != bucket.nbytes:
        raise WeightTransferError(f"bucket {bucket.index} has {bucket.nbytes} bytes, its tensors {offset}")
    return {
        "names": [piece.name for piece in bucket.slices],
        "dtypes": [piece.dtype for piece in bucket.slices],
        "shapes": [list(piece.shape) for piece in bucket.slices],
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": False,
    }


class UpdateFolder:
    """One update as a model folder, which is what SGLang loads: the buckets' files under names of its own.

    Args:
        model_path: where the model's config is copied from, if it is a folder.
    """

    def __init__(self, beside: Path, model_path: str) -> None:
        # On the same file system as the buckets, so that their files need no copy.
        self.path = beside / f"update-{uuid.uuid4().hex}"
        self.path.mkdir()
        self._map: dict[str, str] = {}
        self._nbytes = 0
        for name in ("config.json", "generation_config.json"):
            source = Path(model_path) / name
            if source.is_file():
                shutil.copyfile(source, self.path / name)

    def add(self, bucket: Bucket) -> None:
        """Keeps a bucket's file beyond the time that its sender does.

        Raises:
            OSError: it is not there.
        """
        name = f"model-{bucket.index:05}.safetensors"
        try:
            os.link(bucket.segment, self.path / name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copyfile(bucket.segment, self.path / name)
        self._map |= {piece.name: name for piece in bucket.slices}
        self._nbytes += bucket.nbytes

    def finish(self) -> None:
        """Writes the index."""
        index = {"metadata": {"total_size": self._nbytes}, "weight_map": self._map}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))

    def remove(self) -> None:
        """Removes folder and files; the server has read them."""
        shutil.rmtree(self.path, ignore_errors=True)


OWN_ARGUMENTS = ENGINE_ARGUMENTS["sglang"]


def server_arguments(config: RunConfig, model_path: str, index: int, *, device: str, port: int) -> list[str]:
    """Command line of the server for one engine of a run.

    Args:
        device: type of the devices it runs on.

    Raises:
        EngineError: `rollout.engine_args` has what agentrl gives itself.
    """
    rollout = config.rollout
    own: dict[str, Any] = {
        "model_path": model_path,
        "host": "127.0.0.1",
        "port": port,
        "tp_size": rollout.tensor_parallel_size,
        "dtype": config.model.dtype,
        "device": device,
        "context_length": rollout.max_model_len + CONTEXT_MARGIN,
        "max_running_requests": rollout.max_batch_size,
        # Another one for each engine: two with the same would sample the same answers to a prompt.
        "random_seed": config.data.seed + index,
        "weight_version": "0",
        "log_level_http": "warning",
        # It could go on until the budget of a guided answer is used up.
        "constrained_json_disable_any_whitespace": True,
    }
    if rollout.kv_cache_tokens is not None:
        own["max_total_tokens"] = rollout.kv_cache_tokens + CONTEXT_MARGIN
    if rollout.kv_on_update == "keep":
        # With the overlap scheduler a token is still on its way when requests are paused in place, and would be
        # reported under the version of the weights that come next.
        own["disable_overlap_schedule"] = True
    given = {name.lstrip("-").replace("-", "_"): value for name, value in rollout.engine_args.items()}
    for name in given.keys() & OWN_ARGUMENTS.keys():
        raise EngineError(f"rollout.engine_args.{name} is what agentrl gives SGLang itself: set {OWN_ARGUMENTS[name]}")
    if own.get("disable_overlap_schedule") and given.get("disable_overlap_schedule") is False:
        raise EngineError(
            "rollout.engine_args.disable_overlap_schedule has to be true with rollout.kv_on_update = keep, or the "
            "versions of tokens would not be exact"
        )
    return list(_flags({**own, **given}))


def _flags(arguments: Mapping[str, Any]) -> Iterable[str]:
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if isinstance(value, (list, tuple)):
            yield from map(str, value)
        elif isinstance(value, Mapping):
            yield json.dumps(value)
        elif value is not True:
            yield str(value)
