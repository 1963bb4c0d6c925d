"""Recall on the 389 development questions of the shared data, against the measured figures (done-when 1 of issue 5)."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from retrieval_index.bm25 import Bm25Index
from retrieval_index.build import build_index
from retrieval_index.corpus import PassageStore
from retrieval_index.encoder import Encoder, make_encoder
from retrieval_index.encoder_presets import preset_folder
from retrieval_index.errors import EncoderError
from retrieval_index.evaluate import evaluate, read_questions
from retrieval_index.index import PassageIndex
from retrieval_index.manifest import BM25_FOLDER, PASSAGES_FILE, load
from retrieval_index.retriever import Bm25Retriever, DenseRetriever, HybridRetriever, Retriever

SHARED = Path(os.environ.get("MEMPO_SHARED", Path(__file__).parents[4] / "shared")) / "data"
MEASURED = {
    "flat": {"recall@3": 0.583, "recall@5": 0.660, "all@3": 0.270},
    "bm25": {"recall@3": 0.590, "recall@5": 0.679, "all@3": 0.270},
    "hybrid": {"recall@3": 0.627, "recall@5": 0.699, "all@3": 0.321},
}
TOLERANCE, LEAST_SHARE_OF_FLAT = 0.005, 0.97

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SHARED / "corpus.jsonl").is_file(), reason=f"no shared data at {SHARED}"),
]


class RememberingEncoder:
    """MiniLM that encodes the questions once for all kinds of index."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self.dim, self.fingerprint = encoder.name, encoder.dim, encoder.fingerprint
        self.settings = encoder.settings
        self._encode = cache(lambda texts: encoder.encode_queries(texts))

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(tuple(texts))

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        raise AssertionError("the embeddings were given")


@pytest.fixture(scope="module")
def encoder() -> RememberingEncoder:
    try:
        preset_folder("minilm")
    except EncoderError as absent:
        pytest.skip(str(absent))
    return RememberingEncoder(make_encoder("minilm", num_threads=1))


def figures(encoder: Encoder, kind: str, folder: Path) -> dict[str, float]:
    """Build with the prepared embeddings, at default parameters, and evaluate."""
    build_index(SHARED / "corpus.jsonl", encoder, kind, folder, embeddings=SHARED / "corpus_minilm_fp16.npy")
    retrievers: list[Retriever] = []
    if kind != "bm25":
        retrievers.append(DenseRetriever(encoder, PassageIndex.open(folder, num_threads=1)))
    if kind in ("bm25", "hybrid"):
        words, store = Bm25Index(folder / BM25_FOLDER), PassageStore(folder / PASSAGES_FILE)
        retrievers.append(Bm25Retriever(load(folder), words, store))
    retriever = HybridRetriever(*retrievers) if len(retrievers) == 2 else retrievers[0]
    return evaluate(retriever, read_questions(SHARED / "dev.jsonl"))


@pytest.mark.parametrize("kind", MEASURED)
def test_recall_is_as_measured(encoder: RememberingEncoder, tmp_path: Path, kind: str) -> None:
    found = figures(encoder, kind, tmp_path / "index")
    assert found.pop("questions") == 389
    assert found == pytest.approx(MEASURED[kind], abs=TOLERANCE)


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_approximate_kinds_keep_the_recall_of_flat(encoder: RememberingEncoder, tmp_path: Path, kind: str) -> None:
    found = figures(encoder, kind, tmp_path / "index")
    for name in ("recall@3", "recall@5"):
        assert found[name] >= LEAST_SHARE_OF_FLAT * MEASURED["flat"][name]
