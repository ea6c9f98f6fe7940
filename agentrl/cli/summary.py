"""The last thing a user sees of a run."""

from __future__ import annotations

from rich.console import Console

from agentrl.run import RunResult


def print_summary(console: Console, result: RunResult) -> None:
    """What came out, where it is, and what to type next."""
    console.print()
    if result.accuracy_before is not None and result.accuracy_after is not None:
        console.print(
            f"[bold]held-out accuracy {result.accuracy_before:.3f} -> {result.accuracy_after:.3f}[/bold] "
            f"after {result.steps} training steps, {result.seconds:.0f} s"
        )
    elif result.accuracy_after is not None:
        console.print(f"[bold]held-out accuracy {result.accuracy_after:.3f}[/bold] after {result.steps} training steps")
    fates = ", ".join(f"{count} {fate}" for fate, count in sorted(result.fates.items()))
    console.print(f"{result.dispatched} episodes: {fates}", highlight=False)
    console.print(f"run directory: {result.run_dir}", highlight=False, soft_wrap=True)
    console.print(f"trained model: {result.run_dir / 'model'}", highlight=False, soft_wrap=True)
    console.print(f"curves:        tensorboard --logdir {result.run_dir}", highlight=False, soft_wrap=True)
