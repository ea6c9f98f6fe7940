"""Rooms know only the rooms they may know, and what answers at once loads nothing heavy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "datasets", "renderers", "zmq", "tensorboard", "ray", "vllm")

_RUN_CLI = """
import sys
from agentrl.cli import app
try:
    app({arguments!r})
except SystemExit as end:
    status = end.code or 0
heavy = [name for name in {heavy!r} if name in sys.modules]
print("loaded:", *heavy, file=sys.stderr)
sys.exit(status)
"""


def cli(*arguments: str, cwd: Path = ROOT) -> tuple[int, str, list[str]]:
    """Runs the command line; returns its status, what it said, and which heavy packages it loaded."""
    code = _RUN_CLI.format(arguments=list(arguments), heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    *said, loaded = result.stderr.splitlines()
    assert loaded.startswith("loaded:"), result.stderr
    return result.returncode, result.stdout + "\n".join(said), loaded.split()[1:]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--help"], 0, "train"),
        (["train", "--help"], 0, "examples/math.yaml"),
        (["config", "explain"], 0, "rollout"),
        (["config", "explain", "rollout.n"], 0, "rollout.n"),
        (["config", "schema"], 0, "properties"),
        (["config", "show", "examples/math.yaml"], 0, "path: tiny"),
        (["config", "show", "examples/math.yaml", "rollout.nn=3"], 2, "rollout.n"),
        (["train", "examples/math.yaml", "rollout.max_head_offpolicynes=2"], 2, "max_head_offpolicyness"),
        (["train", "no-such-file.yaml"], 2, "no-such-file.yaml"),
    ],
)
def test_help_and_config_errors_load_nothing_heavy(arguments: list[str], status: int, message: str) -> None:
    code, said, loaded = cli(*arguments)
    assert (code, loaded) == (status, [])
    assert message in said


def test_the_package_itself_loads_nothing_heavy() -> None:
    code = f"import sys, agentrl; sys.exit(any(name in sys.modules for name in {HEAVY!r}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_users_module_needs_no_torch() -> None:
    code = "import sys; from agentrl import AgentLoop, Env, tool, Reward, Task; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_user_code_and_data_are_checked_without_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {train: missing.jsonl}\nagent: {loop: 'agentrl.agents.math:MathAgent'}\ntrainer: {device: cpu}\n"
    )
    status, said, loaded = cli("train", "run.yaml", cwd=tmp_path)
    assert status == 2 and said.startswith("error: ")
    assert not {"torch", "transformers", "datasets"} & set(loaded)


def test_all_public_names_are_there() -> None:
    import agentrl

    for name in agentrl.__all__:
        assert getattr(agentrl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        agentrl.Nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_rooms_know_only_what_they_may_know() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([str(lint), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_agents_and_envs_have_one_name() -> None:
    """`agents` is the import name of another package: ours must never answer to it."""
    code = """
import importlib.util, sys
import agentrl.agents.math, agentrl.envs.math
for name in ("agents", "envs"):
    spec = importlib.util.find_spec(name)
    assert spec is None or not (spec.origin or "").startswith(sys.argv[1]), spec
    assert name not in sys.modules
"""
    subprocess.run([sys.executable, "-P", "-c", code, str(ROOT)], check=True, cwd=ROOT)


def test_the_repository_is_not_on_the_path_of_the_tests() -> None:
    assert str(ROOT) not in sys.path
    assert importlib.util.find_spec("envs") is None


@pytest.mark.parametrize("name", ["agents", "envs"])
def test_agents_and_envs_are_links_into_the_package(name: str) -> None:
    link = ROOT / "agentrl" / name
    assert link.is_symlink() and link.readlink() == Path("..") / name
