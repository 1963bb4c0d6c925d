import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval_index.build import build_index
from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import BuildError, DamagedIndex, DimensionMismatch, EncoderMismatch, ForeignVersion
from retrieval_index.retriever import (
    Bm25Retriever,
    DenseRetriever,
    HybridRetriever,
    Retriever,
    check_index,
    fuse,
    open_retriever,
)

from .conftest import facts

KINDS = {"flat": DenseRetriever, "bm25": Bm25Retriever, "hybrid": HybridRetriever}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    build_index(facts(), HashEncoder(), request.param, tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def retriever(folder: Path) -> Retriever:
    return open_retriever(folder, num_threads=1)


def test_the_manifest_decides_what_is_opened(folder: Path, retriever: Retriever) -> None:
    assert isinstance(retriever, KINDS[retriever.manifest.kind])
    assert check_index(folder) == retriever.manifest


def test_every_kind_finds_the_fact_that_is_asked_for(retriever: Retriever) -> None:
    queries = [document.id.replace("-", " ") for document in facts()]
    hits = retriever.find(queries, 3)
    assert hits.rows[:, 0].tolist() == list(range(len(facts())))
    assert (hits.rows.dtype, hits.scores.dtype) == (np.int64, np.float32)
    assert hits.rows.shape == hits.scores.shape == (len(facts()), 3)
    for rows, scores in zip(hits.rows, hits.scores, strict=True):
        found = retriever.passages(rows, scores)
        assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)
        assert len(found) == np.sum(rows >= 0)


def test_a_query_finds_the_same_alone_and_in_company(retriever: Retriever) -> None:
    queries = [document.text for document in facts()]
    together = retriever.find(queries, 4)
    for i, query in enumerate(queries):
        alone = retriever.find([query], 4)
        assert alone.rows[0].tolist() == together.rows[i].tolist()
        np.testing.assert_allclose(alone.scores[0], together.scores[i], atol=1e-6)


def test_a_k_larger_than_the_index_returns_what_there_is(retriever: Retriever) -> None:
    hits = retriever.find(["mentor Boko"], 1000)
    assert hits.rows.shape == (1, len(facts()))
    found = [row for row in hits.rows[0].tolist() if row >= 0]
    assert len(found) == len(set(found)) > 0


def test_no_query_at_all_and_over_long_queries_are_searched(retriever: Retriever) -> None:
    assert retriever.find([], 2).rows.shape == (0, 2)
    hits = retriever.find(["mentor Boko " * 8_334, "\ud83d\ude00\x00\u202e"], 2)
    assert hits.rows.shape == (2, 2)


def test_fusion_sums_reciprocal_ranks() -> None:
    rows, scores = fuse(np.array([[7, 3, -1]]), np.array([[3, 5, -1]]), 4)
    assert rows.tolist() == [[3, 7, 5, -1]]
    np.testing.assert_allclose(scores, [[1 / 62 + 1 / 61, 1 / 61, 1 / 62, 0]], rtol=1e-6)


def test_fusion_prefers_the_first_ranking_among_equals() -> None:
    rows, _ = fuse(np.array([[1, 2]]), np.array([[3, 4]]), 4)
    assert rows.tolist() == [[1, 3, 2, 4]]


@pytest.mark.parametrize("damage", ["vectors.faiss", "bm25/data.csc.index.npy", "passages.arrow"])
def test_a_truncated_file_of_a_hybrid_is_named(tmp_path: Path, damage: str) -> None:
    build_index(facts(), HashEncoder(), "hybrid", tmp_path / "index")
    path = tmp_path / "index" / damage
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedIndex, match=damage):
        open_retriever(tmp_path / "index")


def test_a_wrong_encoder_and_a_foreign_version_are_refused_before_anything_is_loaded(index_folder: Path) -> None:
    path = index_folder / "manifest.json"
    manifest = path.read_text()
    path.write_text(manifest.replace(HashEncoder().fingerprint, "0" * 64))
    for opened in (check_index, open_retriever):
        with pytest.raises(EncoderMismatch, match="was built with another encoder"):
            opened(index_folder)
    path.write_text(manifest.replace('"dim": 512,\n  "encoder"', '"dim": 256,\n  "encoder"'))
    with pytest.raises(DimensionMismatch):
        check_index(index_folder)
    path.write_text(json.dumps({"format_version": 1}))
    with pytest.raises(ForeignVersion):
        open_retriever(index_folder)


def test_a_dense_index_needs_an_encoder_and_bm25_none(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="needs an encoder"):
        build_index(facts(), None, "flat", tmp_path / "index")
    manifest = build_index(facts(), None, "bm25", tmp_path / "index")
    assert (manifest.encoder, manifest.dim, manifest.metric) == (None, 0, "bm25")


def test_opening_bm25_loads_neither_torch_nor_faiss(tmp_path: Path) -> None:
    build_index(facts(), None, "bm25", tmp_path / "index")
    code = (
        "import sys; from retrieval_index.retriever import open_retriever;"
        f"open_retriever({str(tmp_path / 'index')!r}).find(['mentor Boko'], 3);"
        "print([name for name in ('torch', 'faiss', 'transformers', 'ray', 'mempo_ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
