"""Builds the tiny model from nothing: tokenizer, supervised training, weights, evaluation and model card.

Run `python -m agentrl.tiny.build --help` for the options and see `docs/tiny.md` for what to expect of it.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch
import transformers
import typer
from renderers import Qwen3Renderer
from rich.logging import RichHandler
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from agentrl.envs.math.arithmetic import Split, generate_problems
from agentrl.tiny import tiny_model_path
from agentrl.tiny.card import model_card
from agentrl.tiny.dialogues import write_dialogues
from agentrl.tiny.evaluate import attempt_problems, summarise
from agentrl.tiny.supervise import Supervision, new_model, supervise
from agentrl.tiny.tokenizer import train_tokenizer

TOKENIZER_DIALOGUES = 20_000
"""Dialogues the tokenizer's merges are learned from."""

HELD_OUT_PROBLEMS = 2048
"""Problems of each held-out split that the finished model is measured on."""

BUNDLED_MODEL = tiny_model_path()

EVALUATED_SPLITS: tuple[Split, ...] = ("test", "test_paraphrase")

logger = logging.getLogger(__name__)


def build(output: Path, seed: int, plan: Supervision) -> dict[str, Any]:
    """Trains a tiny model, saves it to `output` in bfloat16 and measures what was saved.

    Returns:
        The report that is also written to `build.json`: how the model was made and how much it solves.
    """
    torch.manual_seed(seed)
    started = time.monotonic()
    tokenizer = train_tokenizer(write_dialogues(TOKENIZER_DIALOGUES, seed, plan.tool_use))
    model = new_model(tokenizer)
    logger.info("model of %d parameters, vocabulary of %d tokens", model.num_parameters(), len(tokenizer))
    supervise(model, Qwen3Renderer(tokenizer), plan, seed)
    save(model, tokenizer, output)
    report = {
        "seed": seed,
        "steps": plan.steps,
        "tool_use_taught": dict(plan.tool_use),
        "parameters": model.num_parameters(),
        "training_seconds": round(time.monotonic() - started),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
        "held_out": evaluate(output),
    }
    (output / "build.json").write_text(json.dumps(report, indent=2) + "\n")
    (output / "README.md").write_text(model_card(report))
    return report


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Writes weights, configuration, generation defaults and tokenizer in the Hugging Face layout."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=Qwen3Renderer(tokenizer).get_stop_token_ids(),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(output)  # type: ignore[arg-type]
    tokenizer.save_pretrained(output)


def evaluate(path: Path) -> dict[str, dict[str, Any]]:
    """Loads the saved model and measures it on the held-out splits, sampled at temperature 1 and greedily."""
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    renderer = Qwen3Renderer(AutoTokenizer.from_pretrained(path))
    results: dict[str, dict[str, Any]] = {}
    for split in EVALUATED_SPLITS:
        problems = generate_problems(split, HELD_OUT_PROBLEMS, seed=0)
        for mode in ("sampled", "greedy"):
            attempts = attempt_problems(model, renderer, problems, sample=mode == "sampled")
            results.setdefault(split, {})[mode] = summarise(attempts)
            logger.info("%s, %s: %.3f solved", split, mode, results[split][mode]["accuracy"])
    return results


def main(
    output: Annotated[Path, typer.Option(help="Folder to write the model to.")] = BUNDLED_MODEL,
    seed: Annotated[int, typer.Option(help="Determines the data, the initial weights and the samples.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimiser steps of supervised training.")] = Supervision().steps,
    threads: Annotated[int, typer.Option(help="Torch threads; one is fastest for a model this small.")] = 1,
) -> None:
    """Builds the tiny model and writes it, its accuracies (build.json) and its model card to OUTPUT."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)])
    torch.set_num_threads(threads)
    build(output, seed, Supervision(steps=steps))


if __name__ == "__main__":
    typer.run(main)
