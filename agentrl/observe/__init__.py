"""What is seen of a run: its folder, its metrics, its live progress."""

from agentrl.observe.metrics import STEP_KEYS, MetricsWriter
from agentrl.observe.progress import Progress, ProgressView, progress_view
from agentrl.observe.run_dir import create_run_dir, write_environment

__all__ = [
    "STEP_KEYS",
    "MetricsWriter",
    "Progress",
    "ProgressView",
    "create_run_dir",
    "progress_view",
    "write_environment",
]
