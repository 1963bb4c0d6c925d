"""Text to normalised vectors: a hashed bag of words (no model), or a local transformers folder.

An index remembers `encoder.fingerprint`, a hash over everything that decides the vectors (weights, tokenizer,
settings), so that it is never searched with another encoder. Making an encoder and reading its fingerprint
loads neither torch nor transformers; the first encoding does.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from retrieval_index.encoder_folder import (
    folder_max_length,
    folder_pooling,
    folder_positions,
    folder_prompts,
    read_json,
    refuse_unknown_modules,
)
from retrieval_index.encoder_presets import PRESETS, preset_folder
from retrieval_index.errors import EncoderError
from retrieval_index.manifest import EncoderRecord

HASH_SETTINGS = {"dim"}
FOLDER_SETTINGS = {"pooling", "query_prefix", "passage_prefix", "max_length", "normalised"}

Vectors = np.ndarray
"""float32 [n, dim], each row of length 1 (or 0 for a text without a word)."""


class Encoder(Protocol):
    """What `build` and `retriever` need. `settings` are the keyword arguments of `make_encoder` beside `name`."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...

    def encode_queries(self, texts: Sequence[str]) -> Vectors: ...

    def encode_passages(self, texts: Sequence[str]) -> Vectors: ...


def make_encoder(name: str, *, device: str = "cpu", num_threads: int | None = None, **settings: Any) -> Encoder:
    """The encoder of this name: `hash`, one of `PRESETS`, or the path of a (sentence-)transformers folder.

    Args:
        device: where a transformer runs; like the threads, no part of the fingerprint.
        num_threads: passes of a transformer side by side, one thread each; None is one, with torch's own threads.
        settings: as recorded in a manifest: `dim` for `hash`; `pooling`, `query_prefix`, `passage_prefix`,
            `max_length`, `normalised` for a folder. They go before those of the preset.

    Raises:
        EncoderError: there is no such encoder, or the folder lacks a file.
    """
    if foreign := sorted(settings.keys() - (HASH_SETTINGS if name == "hash" else FOLDER_SETTINGS)):
        raise EncoderError(f"{name} has no setting {', '.join(foreign)}", "encoder", "leave it out")
    if name == "hash":
        return HashEncoder(**settings)
    if name in PRESETS:
        folder, settings = preset_folder(name), {**PRESETS[name].settings, **settings}
    else:
        folder = Path(name)
    return TransformerEncoder(folder, name=name, device=device, num_threads=num_threads, **settings)


def make_recorded_encoder(
    record: EncoderRecord, name: str | None = None, *, device: str = "cpu", num_threads: int | None = None
) -> Encoder:
    """The encoder that an index was built with, by its recorded name and settings.

    Args:
        name: in place of the recorded one, for a folder that has moved. An encoder of another kind takes its
            own defaults, and fails the comparison of fingerprints.
    """
    name = name or record.name
    settings = record.settings if (name == "hash") == (record.name == "hash") else {}
    return make_encoder(name, device=device, num_threads=num_threads, **settings)


# --- hashed bag of words -------------------------------------------------------------------------------------


class HashEncoder:
    """Deterministic hashed words and neighbouring pairs: for synthetic worlds and tests.

    Each word, and each pair of neighbours in either order, stands for a random vector of ±1 drawn from the bits
    of its SHAKE-256 digest: two different features overlap by about 1/√dim, so collisions are soft, and the
    same text gives the same vector in every process. In a passage a feature counts 1/position, since the title
    comes first; in a query all count alike. So "Boko" finds the passages titled Boko before those that mention
    him, and "mentor Boko" finds "mentor Boko Sari ." before "mentor Sari Boko ." (two words, but not the pair).
    """

    name = "hash"

    def __init__(self, dim: int = 512) -> None:
        if dim < 8 or dim % 8:
            raise EncoderError(f"dim {dim} is no multiple of 8", "encoder", "use 256, 512 or 1024")
        self.dim = dim
        self.settings: dict[str, Any] = {"dim": dim}
        self.fingerprint = hashlib.sha256(f"hash encoder, form 1, dim {dim}".encode()).hexdigest()

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """float32 [n, dim]; a query without a word is the zero vector."""
        return self._encode(texts, fading=False)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """float32 [n, dim]; a passage without a word is the zero vector."""
        return self._encode(texts, fading=True)

    def _encode(self, texts: Sequence[str], fading: bool) -> Vectors:
        sums = [self._sum_of_features(text, fading) for text in texts]
        return normalise(np.array(sums, np.float32).reshape(-1, self.dim))

    def _sum_of_features(self, text: str, fading: bool) -> np.ndarray:
        words = re.findall(r"\w+", text.casefold())
        weights: dict[str, float] = defaultdict(float)
        for features in (words, [" ".join(sorted(pair)) for pair in pairwise(words)]):
            for position, feature in enumerate(features, start=1):
                weights[feature] += 1 / position if fading else 1
        digests = b"".join(hashlib.shake_256(feature.encode()).digest(self.dim // 8) for feature in weights)
        bits = np.unpackbits(np.frombuffer(digests, np.uint8)).reshape(len(weights), self.dim)
        return np.fromiter(weights.values(), np.float32, len(weights)) @ (2 * bits.astype(np.float32) - 1)


# --- transformers --------------------------------------------------------------------------------------------

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
CPU_ROWS, GPU_ROWS = 16, 128
"""Texts in one pass of the model. A pass is as wide as its longest text: on a CPU, 64 questions in sorted passes of 16
take two thirds of the time of one pass; a GPU wants wide passes."""
MIN_LENGTH = 3  # one token beside those that mark begin and end
MAX_LENGTH = 512  # of a folder that allows more: passages are shorter, and attention is quadratic


class TransformerEncoder:
    """A sentence encoder from a local folder: token states pooled and, as a rule, scaled to length 1.

    What is not given is read from the folder (`encoder_folder`). E5 wants `query_prefix="query: "` and
    `passage_prefix="passage: "`; vectors that are not `normalised` are compared by their plain inner product.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "",
        device: str = "cpu",
        num_threads: int | None = None,
        pooling: str | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        max_length: int | None = None,
        normalised: bool = True,
    ) -> None:
        self._folder, self._device, self._num_threads = folder, device, num_threads
        self._config = read_json(folder / "config.json", f"check the path; names are hash, {', '.join(PRESETS)}")
        if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.txt").is_file():
            raise EncoderError(f"{folder} has no tokenizer", "encoder", "copy tokenizer.json beside config.json")
        self.name = name or str(folder)
        refuse_unknown_modules(folder)
        prompts = folder_prompts(folder)
        self.settings: dict[str, Any] = {
            "pooling": pooling or folder_pooling(folder),
            "query_prefix": prompts["query"] if query_prefix is None else query_prefix,
            "passage_prefix": prompts["passage"] if passage_prefix is None else passage_prefix,
            "max_length": folder_max_length(folder, MAX_LENGTH) if max_length is None else max_length,
            "normalised": normalised,
        }
        if self.settings["pooling"] not in POOLINGS:
            raise EncoderError(
                f"unknown pooling {self.settings['pooling']!r}", "encoder", f"use one of {', '.join(POOLINGS)}"
            )
        longest = folder_positions(folder) or math.inf
        if not MIN_LENGTH <= self.settings["max_length"] <= longest:
            raise EncoderError(
                f"{folder} takes {MIN_LENGTH} to {longest} tokens, not {self.settings['max_length']}",
                "max_length",
                "give another --max-length",
            )

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return int(self._config["hidden_size"])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over configuration, tokenizer, weights and settings (90 MB of weights: 0.1 s)."""
        names = ("config.json", "tokenizer.json", "vocab.txt")
        files = [self._folder / name for name in names if (self._folder / name).is_file()]
        weights = sorted(path for pattern in WEIGHT_FILES for path in self._folder.glob(pattern))
        if not weights:
            raise EncoderError(f"{self._folder} has no weights", "encoder", "copy model.safetensors there")
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode())
        for path in files + weights:
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """float32 [n, dim]; longer queries are cut at `max_length` tokens."""
        return self._encode([self.settings["query_prefix"] + text for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """float32 [n, dim]; longer passages are cut at `max_length` tokens."""
        return self._encode([self.settings["passage_prefix"] + text for text in texts])

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        from transformers import AutoModel, AutoTokenizer  # here, since it imports torch and takes 4 s
        from transformers.utils import logging

        logging.disable_progress_bar()  # loading takes 10 ms, and stderr may be somebody's live display
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
            model = AutoModel.from_pretrained(self._folder, local_files_only=True).to(self._device).eval()
        except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last two: torch, of the device
            problem = f"{self._folder} does not load on {self._device}: {error}"
            raise EncoderError(problem, "encoder", "check folder and device") from error
        return tokenizer, model

    def _encode(self, texts: Sequence[str]) -> Vectors:
        # Equal lengths side by side: a pass is as wide as its longest text.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        num_rows = GPU_ROWS
        if self._device == "cpu":
            num_rows = max(1, min(CPU_ROWS, math.ceil(len(order) / (self._num_threads or 1))))
        passes = [order[start : start + num_rows] for start in range(0, len(order), num_rows)]
        # A tokenizer is not thread-safe, the model is.
        tokens = [self._tokens([texts[i] for i in rows]) for rows in passes]
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for rows, pooled_SH in zip(passes, self._map(self._pooled, tokens), strict=True):
            vectors[rows] = pooled_SH
        return normalise(vectors) if self.settings["normalised"] else vectors

    @cached_property
    def _map(self) -> Callable[[Callable[[Any], np.ndarray], Sequence[Any]], Iterable[np.ndarray]]:
        """Passes side by side, a thread each: on a CPU, threads within a pass wait for one another at every layer."""
        if self._device != "cpu" or (self._num_threads or 1) == 1:
            return map
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix="encoder").map

    def _tokens(self, texts: list[str]) -> Any:
        tokenizer, _ = self._model
        return tokenizer(
            texts, padding=True, truncation=True, max_length=self.settings["max_length"], return_tensors="pt"
        ).to(self._device)

    def _pooled(self, tokens: Any) -> np.ndarray:
        import torch

        if self._num_threads is not None:
            torch.set_num_threads(1)  # here: OpenMP's setting belongs to the calling thread
        with torch.inference_mode():
            states_STH = self._model[1](**tokens).last_hidden_state.float()
            pooled_SH = POOLINGS[self.settings["pooling"]](states_STH, tokens["attention_mask"])
        return pooled_SH.cpu().numpy()


def _mean_pooling(states_STH: Any, mask_ST: Any) -> Any:
    weights_ST1 = mask_ST.unsqueeze(-1).to(states_STH.dtype)
    return (states_STH * weights_ST1).sum(1) / weights_ST1.sum(1)


def _cls_pooling(states_STH: Any, mask_ST: Any) -> Any:
    return states_STH[:, 0]


def _max_pooling(states_STH: Any, mask_ST: Any) -> Any:
    return states_STH.masked_fill(mask_ST.unsqueeze(-1) == 0, float("-inf")).amax(1)


def _last_pooling(states_STH: Any, mask_ST: Any) -> Any:
    last_S = (mask_ST * mask_ST.cumsum(1)).argmax(1)  # whichever side is padded
    return states_STH[range(len(last_S)), last_S]


POOLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": _mean_pooling,
    "cls": _cls_pooling,
    "max": _max_pooling,
    "last": _last_pooling,
}


def normalise(vectors: np.ndarray) -> Vectors:
    """Rows scaled to length 1; zero rows stay zero. [n, d] → float32 [n, d]."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
