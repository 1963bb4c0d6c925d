"""What a folder of a sentence encoder says about its use: pooling, prefixes, length.

1_Pooling/config.json                sentence-transformers: how token states become one vector
modules.json                         … and whether something else follows
config_sentence_transformers.json    … prefixes, as `prompts`
sentence_bert_config.json            … longest input
tokenizer_config.json, config.json   transformers: longest input
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retrieval_index.errors import EncoderError

POOLING_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
COUNT_AFTER_PADDING = ("camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "xlm-roberta", "xmod")
"""Model types whose positions begin after the padding token's id, so that many rows of their table are not for text."""


def folder_pooling(folder: Path) -> str:
    """mean, cls, max or last; mean where the folder says nothing.

    Raises:
        EncoderError: another pooling, or several at once.
    """
    config = _read_if_there(folder / "1_Pooling" / "config.json")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode") and value is True]
    if not chosen:
        return "mean"
    if len(chosen) > 1 or chosen[0] not in POOLING_KEYS:
        raise EncoderError(
            f"{folder} pools by {', '.join(chosen)}", "encoder", f"one of {', '.join(POOLING_KEYS)} is understood"
        )
    return POOLING_KEYS[chosen[0]]


def refuse_unknown_modules(folder: Path) -> None:
    """A Dense layer after the pooling, say, would be left out silently.

    Raises:
        EncoderError.
    """
    path = folder / "modules.json"
    modules = read_json(path, "fetch the folder again") if path.is_file() else []
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in KNOWN_MODULES]:
        raise EncoderError(
            f"{folder} has the module {', '.join(unknown)}", "encoder", f"only {', '.join(KNOWN_MODULES)} are applied"
        )


def folder_prompts(folder: Path) -> dict[str, str]:
    """Prefixes of `query` and `passage`; "" where the folder names none."""
    prompts = _read_if_there(folder / "config_sentence_transformers.json").get("prompts") or {}
    return {"query": prompts.get("query") or "", "passage": prompts.get("passage") or prompts.get("document") or ""}


def folder_max_length(folder: Path, at_most: int) -> int:
    """Tokens: what sentence-transformers says, else the least of tokenizer, position table and `at_most`."""
    if said := _read_if_there(folder / "sentence_bert_config.json").get("max_seq_length"):
        return int(said)
    tokenizer = _read_if_there(folder / "tokenizer_config.json").get("model_max_length")
    return min(int(length) for length in (tokenizer, folder_positions(folder), at_most) if length)


def folder_positions(folder: Path) -> int | None:
    """Tokens that the model has positions for; None where the folder does not say."""
    config = _read_if_there(folder / "config.json")
    positions = config.get("max_position_embeddings")
    if positions and config.get("model_type") in COUNT_AFTER_PADDING:
        return int(positions) - config.get("pad_token_id", 1) - 1
    return positions and int(positions)


def read_json(path: Path, remedy: str) -> Any:
    """Raises EncoderError with this remedy where the file is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EncoderError(f"cannot read {path}: {error.strerror}", "encoder", remedy) from error
    except ValueError as error:
        raise EncoderError(f"{path} is not JSON: {error}", "encoder", "fetch the folder again") from error


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path, "fetch the folder again") if path.is_file() else {}
