"""Frameworks that phone home, or write to the user's home, are told not to before any of them is imported."""

from __future__ import annotations

import os
import tempfile

_FOLDER = tempfile.TemporaryDirectory(prefix="agentrl-frameworks-")
os.environ.update(
    DSPY_CACHEDIR=_FOLDER.name,
    LANGSMITH_TRACING="false",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LITELLM_TELEMETRY="False",
    MSWEA_GLOBAL_CONFIG_DIR=_FOLDER.name,
    MSWEA_SILENT_STARTUP="1",
)
