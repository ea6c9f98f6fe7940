"""Which versions of the Ascend software go together, and which are installed. A leaf that every room may import."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "torch_npu", "vllm", "vllm-ascend")
"""The Python packages, by the names to install them under."""
ENGINE_ENVIRONMENT = {"VLLM_ASCEND_ENABLE_NZ": "0"}
"""Of an engine that gets new weights. With the fractal format of matrices, which is the plugin's default, its worker
refuses to begin a weight update: weights copied into such matrices lose precision."""
_HOMES = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/nnae/latest")
"""Where CANN installs itself as root: since 8.5, before, and without its tools."""
_INSTALL_FILES = ("*-linux/ascend_*_install.info", "ascend_*_install.info")
"""Below those. Other files there have versions too, but of single components, which are numbered apart."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Versions that were released for each other; empty for what is not part of it."""

    cann: str
    torch: str
    torch_npu: str
    vllm: str = ""
    vllm_ascend: str = ""

    def installed(self) -> dict[str, str]:
        """The same, as `installed_versions` says it."""
        return {name.replace("vllm_ascend", "vllm-ascend"): text for name, text in asdict(self).items() if text}


COMBINATIONS = (
    # https://github.com/vllm-project/vllm-ascend, docs/source/community/versioning_policy.md in the source archive of
    # 0.23.0.post1 on PyPI; its requirements.txt pins torch==2.10.0 and torch-npu==2.10.0.post4.
    Combination("9.1.0", "2.10.0", "2.10.0.post4", "0.23.0", "0.23.0.post1"),
    # The same file at tag v0.23.0; the wheel of 0.23.0 on PyPI requires the same torch and torch-npu.
    Combination("9.1.0", "2.10.0", "2.10.0.post4", "0.23.0", "0.23.0"),
    # The same file at tag v0.23.0.
    Combination("9.0.1", "2.10.0", "2.10.0.post2", "0.23.0", "0.23.0rc1"),
    # The same file in branch releases/v0.24.0rc.
    Combination("9.0.1", "2.10.0", "2.10.0.post2", "0.24.0", "0.24.0rc1"),
    # docs/source/installation.md and requirements.txt in branch releases/v0.25.1rc.
    Combination("9.0.1", "2.10.0", "2.10.0.post2", "0.25.1", "0.25.1rc1"),
    # https://docs.vllm.ai/projects/ascend/en/v0.26.0rc1/installation.html and requirements.txt in branch
    # releases/v0.26.0rc.
    Combination("9.1.0", "2.10.0", "2.10.0.post4", "0.26.0", "0.26.0rc1"),
    # Without vLLM: https://github.com/Ascend/pytorch, COMPATIBILITY.en.md of 2026-08-21. It has no row for 2.13 yet.
    Combination("9.1.0", "2.10.0", "2.10.0.post4"),
    Combination("9.1.0", "2.11.0", "2.11.0"),
    Combination("9.1.0", "2.12.0", "2.12.0"),
)
"""Known-good combinations, the one to install first. Only those that agentrl's own requirements allow: vllm-ascend
0.18 and older need torch 2.9, and the workers of 0.18 know no weight transfer."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about the installed versions, in words.

    Attributes:
        fatal: known not to work; otherwise merely not known to work.
    """

    text: str
    fatal: bool

    def __str__(self) -> str:
        return self.text


def check_ascend_versions(installed: Mapping[str, str]) -> list[Problem]:
    """What is wrong, or not known to be right, with these versions; empty for a known-good combination.

    Args:
        installed: versions by name, as from `installed_versions`: `cann` and the names in `PACKAGES`. Local parts such
            as `+cpu` do not matter.
    """
    versions = {name: text.partition("+")[0] for name, text in installed.items()}
    problems = [Problem(text, fatal=True) for text in _mismatches(versions)]
    if problems:
        return problems
    if "cann" not in versions:
        problems.append(
            Problem("no installed CANN is found: source its set_env.sh, which sets ASCEND_HOME_PATH", fatal=False)
        )
    if "vllm" in versions and "vllm-ascend" not in versions:
        vllm = versions["vllm"]
        problems.append(
            Problem(
                f"vllm {vllm} is installed without its plugin for NPUs: install vllm-ascend=={_minor(vllm)}.*",
                fatal=False,
            )
        )
    known = _nearest(versions).installed()
    differences = [
        f"{name} {text} rather than {known[name]}" if name in known else f"{name} {text}"
        for name, text in versions.items()
        if name in ("cann", *PACKAGES) and text != known.get(name) and (name != "vllm" or "vllm-ascend" in versions)
    ]
    if differences:
        problems.append(
            Problem(
                f"this combination is not known to work: {', '.join(differences)}; known to work: "
                + ", ".join(f"{name} {text}" for name, text in known.items()),
                fatal=False,
            )
        )
    return problems


def _mismatches(versions: Mapping[str, str]) -> list[str]:
    """What can't work, whatever else is installed."""
    torch, npu = versions.get("torch"), versions.get("torch_npu")
    vllm, plugin = versions.get("vllm"), versions.get("vllm-ascend")
    texts: list[str] = []
    if npu is None:
        texts.append(f"torch_npu is not installed: {_to_install(_nearest(versions))}")
    elif torch is not None and _minor(torch) != _minor(npu):
        texts.append(
            f"torch {torch} and torch_npu {npu} do not match, torch_npu is built for one minor version of torch: "
            f"install torch=={_minor(npu)}.* or torch_npu=={_minor(torch)}.*"
        )
    if plugin is None:
        return texts
    row = _nearest(versions)
    # Of a plugin whose minor version the table does not have, only that vllm's has to be the same is known.
    needed = row.vllm if _minor(row.vllm_ascend) == _minor(plugin) else f"{_minor(plugin)}.*"
    if vllm is None:
        texts.append(f"vllm-ascend {plugin} is installed without vllm: install vllm=={needed}")
    elif _minor(vllm) != _minor(plugin):
        texts.append(
            f"vllm {vllm} and vllm-ascend {plugin} do not match, the plugin is for vllm of its own minor version: "
            f"install vllm=={needed}"
        )
    if _minor(row.vllm_ascend) == _minor(plugin) and torch is not None and _minor(torch) != _minor(row.torch):
        texts.append(
            f"vllm-ascend {plugin} is built for torch {row.torch}, and {torch} is installed: {_to_install(row)}"
        )
    return texts


def installed_versions() -> dict[str, str]:
    """Versions of what is installed among CANN and `PACKAGES`, without importing any of it."""
    versions: dict[str, str] = {}
    cann = cann_version()
    if cann is not None:
        versions["cann"] = cann
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def cann_version(environment: Mapping[str, str] | None = None, homes: tuple[str | Path, ...] = _HOMES) -> str | None:
    """Version of the installed CANN, such as `9.1.0` or `8.3.RC2`; None where there is none.

    Args:
        environment: whose ASCEND_HOME_PATH or ASCEND_TOOLKIT_HOME comes first; by default this process's.
        homes: where it may be otherwise.
    """
    variables = os.environ if environment is None else environment
    named = [variables[name] for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if variables.get(name)]
    for home in (*named, *homes):
        for pattern in _INSTALL_FILES:
            for file in sorted(Path(home).glob(pattern)):
                found = re.search(r"^version=(\S+)", _read(file), re.MULTILINE | re.IGNORECASE)
                if found is not None:
                    return found[1]
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _nearest(versions: Mapping[str, str]) -> Combination:
    """The known combination that shares most with these versions, what matters most first; else the first of all."""

    def shared(row: Combination) -> tuple[int, ...]:
        known = row.installed()
        pairs = [(known.get(name, ""), versions.get(name, "")) for name in ("vllm-ascend", "torch", "vllm")]
        return (
            *(_minor(ours) == _minor(theirs) for ours, theirs in pairs),
            pairs[0][0] == pairs[0][1],
            sum(known.get(name) == text for name, text in versions.items()),
        )

    return max(COMBINATIONS, key=shared)


def _to_install(row: Combination) -> str:
    return "install " + " ".join(f"{name}=={text}" for name, text in row.installed().items() if name in PACKAGES)


def _minor(text: str) -> str:
    """`2.10` of `2.10.0.post4`."""
    return ".".join(text.split(".")[:2])
