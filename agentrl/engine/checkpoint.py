"""What an update of a model's weights has to bring."""

from __future__ import annotations

import json
from pathlib import Path


def checkpoint_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by name, where it is a folder of safetensors; else none."""
    folder = Path(model_path)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    config = folder / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}
