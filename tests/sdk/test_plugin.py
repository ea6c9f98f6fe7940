"""Classes named in a config: each error names the key and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.sdk import AgentLoop, Env
from agentrl.sdk.plugin import PluginError, load_class, load_object

SOURCE = """
from agentrl import AgentLoop

class Solver(AgentLoop):
    def __init__(self, depth: int, *, width: int = 2) -> None: ...

class NotALoop: ...

def function(): return [1]
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a user, importable."""
    sources = {
        "plugin_good": SOURCE,
        "plugin_needs_missing": "import a_package_that_is_not_installed",
        "plugin_typo": "def broken(:",
        "plugin_crashes": "1 / 0",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("modules")
def test_a_path_names_an_object() -> None:
    assert load_object("plugin_good:function", key="data.train")() == [1]
    assert load_class("plugin_good:Solver", AgentLoop, key="agent.loop", kwargs={"depth": 1}).__name__ == "Solver"


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("plugin_good", "'plugin_good' is not of the form package.module:Name"),
        (":Solver", "not of the form"),
        ("plugin_good:", "not of the form"),
        ("plugin_nowhere:Solver", "no module 'plugin_nowhere' .*put it beside the YAML file"),
        ("agentrl.nowhere:Solver", "no module 'agentrl.nowhere'"),
        ("plugin_needs_missing:Solver", "plugin_needs_missing can't be imported: .*a_package_that_is_not_installed"),
        ("plugin_typo:Solver", "plugin_typo can't be imported: SyntaxError"),
        ("plugin_crashes:Solver", "plugin_crashes can't be imported: ZeroDivisionError"),
        ("plugin_good:Solvr", "module plugin_good has no 'Solvr'"),
    ],
)
def test_a_path_that_leads_nowhere_is_explained(path: str, says: str) -> None:
    with pytest.raises(PluginError, match=f"^agent.loop: .*{says}"):
        load_object(path, key="agent.loop")


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("path", "kwargs", "says"),
    [
        ("plugin_good:NotALoop", {}, "must be a subclass of AgentLoop"),
        ("plugin_good:function", {}, "must be a subclass of AgentLoop"),
        ("plugin_good:Solver", {}, r"can't be built with \(no arguments\): .*'depth': see agent.args"),
        ("plugin_good:Solver", {"depth": 1, "height": 2}, r"can't be built with \(depth, height\): .*'height'"),
        ("agentrl:ToolAgentLoop", {}, "'env': set env.cls"),
    ],
)
def test_a_class_that_does_not_fit_is_explained(path: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(PluginError, match=f"^agent.loop: .*{says}"):
        load_class(path, AgentLoop, key="agent.loop", kwargs=kwargs)


def test_an_environment_is_checked_like_an_agent() -> None:
    with pytest.raises(PluginError, match=r"^env.cls: .*'size': see env.args"):
        load_class("agentrl.envs.math:ArithmeticEnv", Env, key="env.cls", kwargs={"size": 3})
