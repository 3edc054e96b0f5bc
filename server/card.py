"""The facts of a model that need no tensors: what router and workers must agree on about text.

A worker's card holds these and more (`messages.Card`); the router's holds only these.
"""

import hashlib
import json
from pathlib import Path
from typing import Any


def text_facts(model_dir: str | Path, model: str) -> dict[str, str]:
    """`Card.same` as far as the router knows it: "model" (profile's path), "vocab_size", "tokenizer" (hash)."""
    folder = Path(model_dir)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return {"model": model, "vocab_size": str(read_config(folder)["vocab_size"]), "tokenizer": digest[:16]}


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """config.json of the text model; multimodal ones keep it one level down."""
    config: dict[str, Any] = json.loads((Path(model_dir) / "config.json").read_bytes())
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and "vocab_size" not in config else config
