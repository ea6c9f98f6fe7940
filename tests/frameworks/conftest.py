"""Frameworks that phone home are told not to, before any of them is imported."""

from __future__ import annotations

import os

os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LITELLM_TELEMETRY="False",
    MSWEA_SILENT_STARTUP="1",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    LANGSMITH_TRACING="false",
)
