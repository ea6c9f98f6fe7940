"""`dump_yaml`: a configuration as the YAML file that would give it."""

from __future__ import annotations

from typing import Any

from agentrl.config.ignored import given, ignored_keys
from agentrl.config.schema import RunConfig
from agentrl.config.yaml_text import to_yaml


def dump_yaml(config: RunConfig) -> str:
    """Every key with its value, defaults included; `load_config` gives an equal configuration back.

    Keys that have no effect under this configuration are left out unless they were given, since a file that
    holds them is refused.
    """
    values: dict[str, Any] = config.model_dump()
    for problem in ignored_keys(config):
        if not given(config, problem.key):
            *sections, leaf = problem.key.split(".")
            parent = values
            for section in sections:
                parent = parent[section]
            del parent[leaf]
    return to_yaml({name: section for name, section in values.items() if section})
