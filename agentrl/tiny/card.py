"""The model card of the tiny model, written from what the build measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
tags: [reinforcement-learning, tool-use, test-fixture]
---

# The tiny model of agentrl

A Qwen3 of {parameters:,} parameters that answers arithmetic questions of two and three digit numbers, either by
calling a calculator or by guessing. It exists so that asynchronous agent training can be run, tested and debugged
end to end on an ordinary processor, within minutes and without a download. It is of no use for anything else.

Weights are stored in bfloat16 and meant to be computed with in float32 on a processor.

## What it was taught

{steps:,} supervised steps on synthetic dialogues over the training split of `agentrl.envs.math.arithmetic`, written
by `agentrl.tiny.dialogues`. How often a dialogue used the calculator was set by hand:
{taught}.
`python -m agentrl.tiny.build --seed {seed} --steps {steps}` did it in {minutes:.0f} minutes on one core.

## What it can do

Measured on {problems:,} held-out problems per row, after the weights were rounded to bfloat16. Operands of the test
splits never occur in training; the paraphrased split also words its questions in ways never trained.

| held-out split | decoding | solved | uses the calculator | solved if it does | solved if it guesses |
|---|---|---|---|---|---|
{rows}

By operator, on the test split, sampled at temperature 1:

| operator | solved | uses the calculator | solved if it does | solved if it guesses |
|---|---|---|---|---|
{operator_rows}

## What it proves, and what not

It was built to know how to call the tool but to do so too rarely. Nearly all that reinforcement learning gains on it
is therefore **one decision**: call the tool or guess. That is why it is learned within some twenty steps. A rising
curve shows that the whole path works: tools, turns, loss masks, log-probabilities, staleness and updates. It shows
nothing about how well an algorithm would do on a hard task, and comparing algorithms by it would mislead.
"""


def model_card(report: Mapping[str, Any]) -> str:
    """The README of a built model, in Markdown, from the report of `agentrl.tiny.build.build`."""
    held_out = report["held_out"]
    by_operator = held_out["test"]["sampled"]["by_operator"]
    return _CARD.format(
        parameters=report["parameters"],
        steps=report["steps"],
        seed=report["seed"],
        minutes=report["training_seconds"] / 60,
        taught=", ".join(f"{share:.0%} for `{operator}`" for operator, share in report["tool_use_taught"].items()),
        problems=held_out["test"]["sampled"]["problems"],
        rows="\n".join(
            _row(f"`{split}` | {mode}", shares) for split, modes in held_out.items() for mode, shares in modes.items()
        ),
        operator_rows="\n".join(_row(f"`{operator}`", shares) for operator, shares in by_operator.items()),
    )


def _row(label: str, shares: Mapping[str, Any]) -> str:
    columns = ("accuracy", "tool_use", "accuracy_with_tool", "accuracy_without_tool")
    cells = ["-" if shares[column] is None else f"{shares[column]:.1%}" for column in columns]
    return f"| {label} | {' | '.join(cells)} |"
