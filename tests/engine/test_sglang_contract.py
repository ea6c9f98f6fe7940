"""What agentrl says to SGLang, given to SGLang's own request classes.

Needs SGLang's files, not what it depends on: `pip install --no-deps sglang==0.5.23` in any environment that has
agentrl, or a folder with the unpacked wheel in AGENTRL_SGLANG_SOURCE. Of SGLang's modules those that define requests
are loaded as they are; the few that need accelerators are replaced by the names that others import from them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from agentrl.config import load_config
from agentrl.engine import sglang_engine, sglang_payloads, sglang_server
from agentrl.engine.sglang_payloads import (
    bucket_payload,
    disk_payload,
    generate_payload,
    group_payload,
    read_answer,
    server_arguments,
    version_payload,
)
from agentrl.record.protocols import Bucket, GenerateRequest, WeightGroup
from agentrl.weights.bucket import BucketLayout, bucket_nbytes, fill, pack


def _source() -> Path | None:
    """SGLang's package folder."""
    given = os.environ.get("AGENTRL_SGLANG_SOURCE")
    if given:
        return Path(given) / "sglang"
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


SOURCE = _source()
pytestmark = pytest.mark.skipif(
    SOURCE is None or not (SOURCE / "srt/managers/io_struct.py").is_file(),
    reason="needs SGLang's files: pip install --no-deps sglang==0.5.23",
)

PACKAGES = ("", ".srt", *(f".srt.{name}" for name in ("utils", "managers", "sampling", "lora", "multimodal")))
STUBS: dict[str, dict[str, Any]] = {
    "managers.schedule_batch": {
        "Modality": str,
        "MultimodalProcessorOutput": dict,
        "ReturnHiddenStatesMode": bool | str,
        "SamplingLogprobsMode": str,
        "get_return_hidden_states_mode": None,
    },
    "multimodal.mm_utils": {"has_valid_data": lambda data: data is not None},
    "lora.lora_registry": {"LoRARef": dict},
}


@pytest.fixture(scope="module")
def sglang() -> Iterator[Any]:
    """`sglang("srt.managers.io_struct")`: one of its modules."""
    assert SOURCE is not None
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    for name in PACKAGES:
        # A package without its `__init__`, which imports everything.
        package = types.ModuleType(f"sglang{name}")
        package.__path__ = [str(SOURCE.joinpath(*name.split(".")[1:]))]
        sys.modules[f"sglang{name}"] = package
    vars(sys.modules["sglang.srt.utils"]).update(ImageData=dict, VideoData=dict)
    for name, content in STUBS.items():
        module = types.ModuleType(f"sglang.srt.{name}")
        vars(module).update(content)
        sys.modules[module.__name__] = module
    yield lambda name: importlib.import_module(f"sglang.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.update(before)


def request_of(**changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {
        "request_id": "r1",
        "token_ids": np.array([1, 2, 3], np.int32),
        "max_tokens": 9,
        "temperature": 0.7,
        "stop_token_ids": (5, 7),
        "seed": 2**62 + 1,
        **changes,
    }
    return GenerateRequest(**values)


def over_http(body: dict[str, Any]) -> Any:
    return json.loads(json.dumps(body))


def accepted(kind: type, body: dict[str, Any]) -> Any:
    """The request that the server makes of a body. It ignores keys that it does not know: there must be none."""
    body = over_http(body)
    made = TypeAdapter(kind).validate_python(body)
    known = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [f.name for f in dataclasses.fields(kind)]
    assert body.keys() <= set(known)
    assert {name: getattr(made, name) for name in body} == body
    return made


@pytest.mark.parametrize(
    "request_",
    [
        request_of(),
        request_of(stop=("</a>", "x")),
        request_of(stop_token_ids=()),
        request_of(temperature=0.0),
        request_of(top_p=0.9, top_k=20, seed=2**63 - 1),
        request_of(json_schema='{"type": "object"}'),
    ],
)
def test_generate(sglang: Any, request_: GenerateRequest) -> None:
    body = over_http(generate_payload(request_, "f" * 32))
    sglang("api.v1.api_types").GenerateRequest.from_json_value(body)  # the server's first check
    made = accepted(sglang("srt.managers.io_struct").GenerateReqInput, body)
    assert made.input_ids == [1, 2, 3] and made.return_logprob is True
    kind = sglang("srt.sampling.sampling_params").SamplingParams
    assert body["sampling_params"].keys() <= set(kind.__struct_fields__)
    sampling = kind(**body["sampling_params"])
    sampling.verify(vocab_size=100)
    assert sampling.max_new_tokens == 9 and sampling.sampling_seed == request_.seed
    assert sampling.stop_token_ids == (set(request_.stop_token_ids) or None)
    assert sampling.ignore_eos == (not request_.stop_token_ids) and sampling.no_stop_trim
    assert sampling.json_schema == (request_.json_schema or None)
    if request_.temperature == 0:
        assert sampling.top_k == 1  # greedy
    elif request_.top_k == -1:
        assert sampling.top_k > 10**6 and sampling.temperature == 0.7


def test_a_guided_answer_is_whole_with_the_models_own_end() -> None:
    """SGLang lets a value end with the model's own ends alone, whatever the request named."""
    answer = {
        "output_ids": [4, 6],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 6},
            "output_token_logprobs": [[-0.5, 4, None], [-0.5, 6, None]],
            "weight_versions": [{"start": 0, "end": 2, "version": "3"}],
        },
    }
    assert read_answer(request_of(json_schema="{}"), answer).finish_reason == "stop"
    assert read_answer(request_of(), answer).finish_reason == "interrupted"


def test_pauses_and_other_control(sglang: Any) -> None:
    requests = sglang("srt.managers.io_struct")
    for mode in ("retract", "in_place"):
        assert accepted(requests.PauseGenerationReqInput, {"mode": mode}).mode == mode
    with pytest.raises(ValidationError):
        accepted(requests.PauseGenerationReqInput, {"mode": "keep"})
    accepted(requests.ContinueGenerationReqInput, {"torch_empty_cache": False})
    accepted(requests.AbortReq, {"rid": "f" * 32})
    accepted(requests.DestroyWeightsUpdateGroupReqInput, {"group_name": "g"})
    for kind in ("BeginWeightUpdate", "EndWeightUpdate", "ReleaseMemoryOccupation", "ResumeMemoryOccupation"):
        accepted(getattr(requests, f"{kind}ReqInput"), {})


def test_updates_abort_nothing_and_say_their_version(sglang: Any) -> None:
    requests = sglang("srt.managers.io_struct")
    disk = accepted(requests.UpdateWeightFromDiskReqInput, disk_payload(Path("/updates/one"), 7))
    assert (disk.model_path, disk.weight_version) == ("/updates/one", "7")
    assert disk.abort_all_requests is False and disk.flush_cache is False
    version = accepted(requests.UpdateWeightVersionReqInput, version_payload(8))
    assert (version.new_version, version.abort_all_requests) == ("8", False)
    group = WeightGroup("agentrl-weights-1-0", "10.0.0.1:2345", "nccl", 5, 3, 60.0)
    made = accepted(requests.InitWeightsUpdateGroupReqInput, group_payload(group))
    assert (made.master_address, made.master_port, made.rank_offset) == ("10.0.0.1", 2345, 3)


def test_buckets_lie_as_sglang_reads_them(sglang: Any) -> None:
    tensors = [(f"t{i}", torch.randn(3 + i, 5).to(torch.bfloat16)) for i in range(7)]
    real = sglang("srt.weight_sync.tensor_bucket").FlattenedTensorBucket
    kind = sglang("srt.managers.io_struct").UpdateWeightsFromDistributedReqInput
    received: dict[str, torch.Tensor] = {}
    for index, pieces in enumerate(pack(tensors, BucketLayout(120, alignment=1, split=False))):
        flat = torch.zeros(bucket_nbytes(pieces), dtype=torch.uint8)
        fill(flat, pieces)
        bucket = Bucket(index, "", flat.numel(), 0, tuple(piece for piece, _ in pieces))
        made = accepted(kind, bucket_payload(bucket, "g"))
        assert made.load_format == "flattened_bucket" and made.abort_all_requests is False
        empty = real.empty(made.names, made.dtypes, made.shapes, "cpu")
        empty.get_flattened_tensor().copy_(flat)  # the broadcast
        received |= dict(empty.reconstruct_tensors())
    assert list(received) == [name for name, _ in tensors]
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors)


def test_versions_are_read_as_sglang_writes_them(sglang: Any) -> None:
    real = sglang("srt.utils.weight_versions")

    class Running:
        def __init__(self) -> None:
            self.output_ids: list[int] = []
            self.weight_version_events: list[Any] = []

    running, expected = Running(), []
    for version, count in [(0, 0), (1, 3), (2, 0), (3, 1), (7, 4)]:
        running.output_ids += range(count)
        expected += [version] * count
        real.record_weight_version_events([running], old_version=str(version))
    running.output_ids += [1, 2]
    expected += [9, 9]
    spans = real.compute_weight_version_spans(running.weight_version_events, "9", len(expected))
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": len(expected)},
        "output_token_logprobs": [[-0.5, token, None] for token in running.output_ids],
    }
    real.add_weight_versions_to_meta_info(meta, spans, num_output_tokens=len(expected))
    part = read_answer(request_of(), over_http({"output_ids": running.output_ids, "meta_info": meta}))
    assert part.versions.tolist() == expected


def test_all_paths_exist() -> None:
    assert SOURCE is not None
    called = {
        path
        for module in (sglang_engine, sglang_payloads, sglang_server)
        for path in re.findall(r'"(/[a-z_]+)"', Path(str(module.__file__)).read_text())
    }
    server = (SOURCE / "srt/entrypoints/http_server.py").read_text()
    routes = set(re.findall(r'@app\.(?:get|post|api_route)\(\s*"(/[a-z_]+)"', server))
    assert len(called) > 12 and called <= routes


def test_all_flags_exist() -> None:
    assert SOURCE is not None
    fields: set[str] = set()
    for file in (SOURCE / "srt/arg_groups/fields").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add(node.target.id)
    config = load_config(
        {
            "model": {"path": "tiny"},
            "data": {"train": "agentrl.envs.math:arithmetic_tasks", "max_prompt_length": 256},
            "env": {"cls": "agentrl.envs.math:ArithmeticEnv"},
            "rollout": {"engine": "sglang", "kv_cache_tokens": 9000, "kv_on_update": "keep"},
            "trainer": {"total_steps": 1, "device": "cpu"},
        },
        [],
    )
    flags = [word for word in server_arguments(config, "m", 0, device="cpu", port=1) if word.startswith("--")]
    assert len(flags) == 14 and {flag[2:].replace("-", "_") for flag in flags} <= fields
