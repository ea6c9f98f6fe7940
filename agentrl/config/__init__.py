"""What a run is told to do: the keys, their YAML files, and the checks made before anything heavy is loaded."""

from agentrl.config.correction import RolloutCorrectionConfig
from agentrl.config.describe import explain, json_schema
from agentrl.config.dump import dump_yaml
from agentrl.config.errors import ConfigError, Problem
from agentrl.config.keys import known_keys
from agentrl.config.layers import preset_names
from agentrl.config.load import load_config
from agentrl.config.notes import config_notes, update_path
from agentrl.config.schema import RunConfig

__all__ = [
    "ConfigError",
    "Problem",
    "RolloutCorrectionConfig",
    "RunConfig",
    "config_notes",
    "dump_yaml",
    "explain",
    "json_schema",
    "known_keys",
    "load_config",
    "preset_names",
    "update_path",
]
