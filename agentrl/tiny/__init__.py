"""The bundled tiny model: a policy of a million parameters that learns within minutes on a laptop.

It answers arithmetic questions, either by calling a calculator or by guessing, and is made by
`python -m agentrl.tiny.build`. The model card beside the weights says what it can do and what it proves.
"""

from pathlib import Path

TINY_MODEL = "tiny"
"""The name that stands for the bundled model wherever a model path is expected."""


def tiny_model_path() -> Path:
    """The folder of the bundled model, in the Hugging Face layout: config, tokenizer and weights."""
    return Path(__file__).parent / "model"
