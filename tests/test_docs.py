"""Documentation is true: its code runs, its links lead somewhere, its keys load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from agentrl.config import explain, known_keys, load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [(page.name, code) for page in PAGES for kind, code in BLOCK.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_examples_define_what_they_say(page: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if 'load("runs/' in code:
        compile(code, page, "exec")
    else:
        exec(compile(code, page, "exec"), {"__name__": "documentation"})


@pytest.mark.parametrize(("page", "code"), blocks("yaml"))
def test_yaml_examples_use_known_keys(page: str, code: str) -> None:
    def keys(node: object, prefix: str = "") -> list[str]:
        if not isinstance(node, dict) or prefix.endswith("args."):
            return [prefix.rstrip(".")]
        return [key for name, value in node.items() for key in keys(value, f"{prefix}{name}.")]

    for key in keys(yaml.safe_load(code)):
        assert explain(key)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_named_in_the_text_exist(page: Path) -> None:
    sections = "|".join(sorted({key.split(".")[0] for key in known_keys()}))
    for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:[:=][^`]*)?`", page.read_text()):
        if not key.endswith((".md", ".py", ".yaml", ".json")):
            assert explain(key), f"{page.name} names {key}"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_example_loads(example: Path) -> None:
    load_config(example)


def test_commands_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for _, code in blocks("bash"):
        for target in re.findall(r"^make (\S+)", code, re.MULTILINE):
            assert f"\n{target}:" in makefile
        for file in re.findall(r"\S+\.yaml", code):
            assert (ROOT / file).is_file()


def test_the_readme_shows_the_example_as_it_is() -> None:
    (_, shown), *_ = blocks("python")
    assert (ROOT / "examples" / "my_agent.py").read_text().endswith(shown)
