"""`ports.Tokenizer` over a model folder's `tokenizer.json`, with the `tokenizers` package alone.

What this adds to `tokenizers` is *bytes*: spans are located by byte offsets (algorithm.md §1), so every id must say
which bytes it stands for. Three kinds of vocabulary are known:

    byte-level BPE (Qwen2.5, SmolLM2, Llama 3)    each character of a token stands for one byte
    Metaspace (the tiny policy, SentencePiece)    "▁" stands for a space; `<0xNN>` for a byte
    added tokens (chat markers, tags)             their own UTF-8 text
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from mempo_ray.errors import ConfigError

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class FileTokenizer:
    """A `ports.Tokenizer` read from a Hugging Face folder.

    `decode` is the concatenation of `token_bytes`, so a leading "▁" stays a space: with a Metaspace tokenizer the text
    `<answer>Sari</answer>` comes back as `<answer> Sari</answer>`.
    """

    def __init__(self, tokenizer: Tokenizer, end_of_turn_id: int) -> None:
        self._tokenizer = tokenizer
        layout = json.loads(tokenizer.to_str())
        self._bytes = _bytes_of_ids(tokenizer, layout)
        self.end_of_turn_id = end_of_turn_id
        self.unknown_id = _unknown_id(tokenizer, layout["model"])
        """The token that stands for every word outside the vocabulary; None: each text has tokens of its own."""

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Reads `tokenizer.json`; the end-of-turn token is `eos_token` of `tokenizer_config.json`, else of
        `generation_config.json`.

        Raises:
            ConfigError: no such folder, no tokenizer in it, one that cannot be read, or no end-of-turn token named.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            missing = "holds no tokenizer.json" if folder.is_dir() else "does not exist"
            raise ConfigError(f"policy.model: folder {folder} {missing}; give a complete Hugging Face model folder")
        return cls(tokenizer := _read_tokenizer(path), _end_of_turn_id(tokenizer, folder))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        pieces = [self.token_bytes(i) for i in encoding.ids]
        if b"".join(pieces) == text.encode():  # exact even where a character is split over tokens
            return encoding.ids, list(pairwise(accumulate(map(len, pieces), initial=0)))
        byte_at = list(accumulate((len(character.encode()) for character in text), initial=0))
        return encoding.ids, [(byte_at[start], byte_at[stop]) for start, stop in encoding.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Ids outside the vocabulary (rows that pad an embedding) stand for no bytes."""
        return self._bytes.get(token_id, b"")


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the package raises nothing narrower for a file that it cannot read
        raise ConfigError(f"policy.model: {path} is no tokenizer file ({error}); copy the model folder again") from None


def read_json(path: Path) -> Mapping:
    """The object in a JSON file of a model folder; empty where there is no such file. Raises ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"policy.model: {path} is not JSON ({error}); copy the model folder again") from None


def token_text(entry: str | Mapping | None) -> str:
    """A special token of `tokenizer_config.json`: plain text, or an object with `content`; '' where absent."""
    return entry["content"] if isinstance(entry, Mapping) else entry or ""


def _end_of_turn_id(tokenizer: Tokenizer, folder: Path) -> int:
    name = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    if name and (found := tokenizer.token_to_id(name)) is not None:
        return found
    found = read_json(folder / "generation_config.json").get("eos_token_id")
    found = found[0] if isinstance(found, list) else found
    if found is None:
        raise ConfigError(
            f"policy.model: {folder / 'tokenizer_config.json'} names no eos_token of this vocabulary; "
            "set it to the token that ends a turn"
        )
    return int(found)


def _unknown_id(tokenizer: Tokenizer, model: Mapping) -> int | None:
    if model["type"] == "Unigram":
        return model["unk_id"]
    name = model.get("unk_token")
    return tokenizer.token_to_id(name) if name else None


def _bytes_of_ids(tokenizer: Tokenizer, layout: Mapping) -> dict[int, bytes]:
    parts = [part for name in ("pre_tokenizer", "decoder") for part in _parts(layout[name])]
    kinds = {part["type"] for part in parts}
    space = next((p["replacement"] for p in parts if p["type"] == "Metaspace"), "▁")
    added = {i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()}

    def stands_for(token: str) -> bytes:
        if "ByteLevel" in kinds:
            return bytes(map(_BYTE_OF.__getitem__, token))
        if "ByteFallback" in kinds and (match := _BYTE_FALLBACK.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(space, " ").encode()

    plain = {i: stands_for(token) for token, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    return plain | added


def _parts(component: Mapping | None) -> Iterator[Mapping]:
    """The members of a (nested) Sequence in tokenizer.json, or the component itself."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for member in component.get("pretokenizers") or component.get("decoders") or ():
            yield from _parts(member)
    else:
        yield component


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
