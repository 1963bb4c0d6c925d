"""BM25 over stemmed words: an inverted file of `bm25s`, memory-mapped (Robertson and Zaragoza 2009, Lucene's form).

The words are made here and not by `bm25s.tokenize`, which numbers them in the order of a Python set: the same corpus
must give the same files. Building holds the words of all passages in memory (about 10 bytes each); searching maps
the scores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import Stemmer
from bm25s.stopwords import STOPWORDS_EN

from retrieval_index.errors import DamagedIndex
from retrieval_index.manifest import BUILD_AGAIN

PARAMETERS: Mapping[str, Any] = {"method": "lucene", "k1": 1.2, "b": 0.75, "stopwords": "en", "stemmer": "english"}
"""What the manifest records."""
WORD = re.compile(r"\w\w+")
STOPWORDS = frozenset(STOPWORDS_EN)


def make_stems() -> Callable[[str], list[str]]:
    """A function from text to its stems: lower case, two letters or more, no stop words. Not thread-safe."""
    stem = Stemmer.Stemmer("english").stemWords

    def stems(text: str) -> list[str]:
        return stem([word for word in WORD.findall(text.lower()) if word not in STOPWORDS])

    return stems


def write_bm25(texts: Iterable[str], folder: Path) -> None:
    """Index texts, row i for text i, into a new folder."""
    stems = make_stems()
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(stem, len(vocabulary)) for stem in stems(text)] for text in texts]
    if not vocabulary:  # no text has a word: bm25s wants a column, and an average length
        vocabulary[""], ids[0] = 0, [0]
    model = bm25s.BM25(method=PARAMETERS["method"], k1=PARAMETERS["k1"], b=PARAMETERS["b"])
    model.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    model.save(folder, show_progress=False)


class Bm25Index:
    """An opened inverted file."""

    def __init__(self, folder: Path) -> None:
        try:
            self._model = bm25s.BM25.load(folder, mmap=True)
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise DamagedIndex(f"{folder} cannot be read: {error}", "index", BUILD_AGAIN) from error
        self._stems = make_stems()

    def __len__(self) -> int:
        return int(self._model.scores["num_docs"])

    def search(self, queries: Sequence[str], top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and scores, best first, equal scores in the order of the rows.

        Returns:
            rows int64 [n, k] and scores float32 [n, k], k = min(top_k, passages); row -1 where fewer passages
            share a word with the query.
        """
        top_k = min(top_k, len(self))
        rows = np.full((len(queries), top_k), -1, np.int64)
        scores = np.zeros((len(queries), top_k), np.float32)
        for i, query in enumerate(queries):
            found, their_scores = self._search_one(query, top_k)
            rows[i, : len(found)], scores[i, : len(found)] = found, their_scores
        return rows, scores

    def _search_one(self, query: str, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self._model.get_tokens_ids(self._stems(query))
        if not ids:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        scores = self._model.get_scores_from_ids(ids)
        least = max(np.partition(scores, -top_k)[-top_k], np.finfo(np.float32).tiny)
        rows = np.flatnonzero(scores >= least)
        rows = rows[np.argsort(-scores[rows], kind="stable")][:top_k]
        return rows, scores[rows]
