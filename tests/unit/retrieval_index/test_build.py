from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from retrieval_index.build import build_index, stamp_sources
from retrieval_index.corpus import Document
from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import BuildError, CorpusError
from retrieval_index.index import PassageIndex
from retrieval_index.manifest import FileStamp, load, verify
from retrieval_index.plan import KINDS, Tuning
from retrieval_index.progress import TimeLeft
from retrieval_index.retriever import open_retriever

from .conftest import facts


def random_facts(count: int) -> list[Document]:
    return [Document(str(i), "", f"mentor n{i} n{i * 7 % count} .") for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_finds_a_passage_by_its_own_words(tmp_path: Path, kind: str) -> None:
    encoder, count = HashEncoder(64), 10_000 if kind == "ivfpq" else 600
    manifest = build_index(random_facts(count), encoder, kind, tmp_path / "index")
    assert (manifest.kind, manifest.count, manifest.dim) == (kind, count, 0 if kind == "bm25" else 64)
    hits = open_retriever(tmp_path / "index").find([f"mentor n{i}" for i in range(50)], 5)
    assert (hits.rows.dtype, hits.scores.dtype, hits.rows.shape) == (np.int64, np.float32, (50, 5))
    assert np.mean([i in found for i, found in enumerate(hits.rows)]) >= 0.9


def test_an_index_appears_whole_with_its_files_and_nothing_else(tmp_path: Path) -> None:
    manifest = build_index(facts(), HashEncoder(), "flat", tmp_path / "index")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]
    names = {path.name for path in (tmp_path / "index").iterdir()}
    assert names == {"manifest.json", "vectors.faiss", "passages.arrow"}
    assert verify(tmp_path / "index") == manifest == load(tmp_path / "index")


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="already used"):
        build_index([*facts(), facts()[0]], HashEncoder(), "flat", tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_the_same_corpus_gives_the_same_checksums(tmp_path: Path) -> None:
    first = build_index(random_facts(600), HashEncoder(64), "ivf", tmp_path / "a")
    second = build_index(random_facts(600), HashEncoder(64), "ivf", tmp_path / "b")
    assert first == second
    assert first.index_id == second.index_id


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    build_index(facts(), HashEncoder(), "flat", tmp_path / "index")
    with pytest.raises(BuildError, match="exists"):
        build_index(facts()[:5], HashEncoder(), "flat", tmp_path / "index")
    build_index(facts()[:5], HashEncoder(), "flat", tmp_path / "index", overwrite=True)
    assert load(tmp_path / "index").count == 5
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_given_embeddings_replace_the_encoder_pass(tmp_path: Path) -> None:
    encoder = HashEncoder(64)
    vectors = encoder.encode_passages([document.text for document in facts()])
    np.save(tmp_path / "vectors.npy", vectors.astype(np.float16))
    embeddings = tmp_path / "vectors.npy"
    manifest = build_index(facts(), encoder, "flat", tmp_path / "given", embeddings=embeddings)
    assert manifest.encoder.fingerprint == encoder.fingerprint
    rows, scores = PassageIndex.open(tmp_path / "given").search(vectors, 1)
    assert rows[:, 0].tolist() == list(range(len(vectors)))
    np.testing.assert_allclose(scores, 1, atol=1e-3)
    with pytest.raises(BuildError, match=r"shape \(24, 64\), corpus and encoder need \(5, 64\)"):
        build_index(facts()[:5], encoder, "flat", tmp_path / "short", embeddings=embeddings)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_index(
        random_facts(1500),
        HashEncoder(64),
        "flat",
        tmp_path / "index",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 1500), (1024, 1500), (1500, 1500)]


def test_the_time_left_is_written_now_and_then_and_at_the_end() -> None:
    lines, times = [], iter((0.0, 5.0, 10.0, 15.0, 40.0))
    progress = TimeLeft(lambda line, last: lines.append((line, last)), every_s=10, clock=lambda: next(times))
    for done in (1000, 1500, 2000, 2500, 3000):  # the first 1,000 were there already
        progress(done, 3000)
    assert lines == [
        ("encoded 2,000 of 3,000 passages, 100 a second, 10 s left", False),
        ("encoded 3,000 of 3,000 passages, 50 a second, 0 s left", True),
    ]


def test_vectors_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    vectors = np.ones((len(facts()), 64), np.float16)
    vectors[3, 5] = np.nan
    np.save(tmp_path / "v.npy", vectors)
    with pytest.raises(BuildError, match="NaN or infinity"):
        build_index(facts(), HashEncoder(64), "flat", tmp_path / "index", embeddings=tmp_path / "v.npy")


def test_vectors_of_an_encoder_that_does_not_normalise_keep_their_length(tmp_path: Path) -> None:
    class LongEncoder(HashEncoder):
        def __init__(self) -> None:
            super().__init__(64)
            self.settings = {**self.settings, "normalised": False}

        def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
            return 3 * super().encode_passages(texts)

    query = HashEncoder(64).encode_queries(["mentor Boko"])
    build_index(facts(), LongEncoder(), "flat", tmp_path / "long")
    build_index(facts(), HashEncoder(64), "flat", tmp_path / "unit")
    long, unit = (PassageIndex.open(tmp_path / name).search(query, 1)[1] for name in ("long", "unit"))
    np.testing.assert_allclose(long, 3 * unit, rtol=1e-5)


def test_parameters_that_are_given_are_in_the_manifest(tmp_path: Path) -> None:
    tuning = Tuning(nlist=5, nprobe=2, hnsw_links=8, ef_construction=50, ef_search=33)
    ivf = build_index(random_facts(600), HashEncoder(64), "ivf", tmp_path / "ivf", tuning=tuning)
    assert (ivf.factory, ivf.search) == ("IVF5,Flat", {"nprobe": 2})
    both = build_index(
        random_facts(600), HashEncoder(64), "hybrid", tmp_path / "both", dense_kind="hnsw", tuning=tuning
    )
    assert (both.factory, both.search, both.metric) == ("HNSW8,Flat+BM25", {"efSearch": 33}, "reciprocal_rank")


def test_the_plan_is_announced_before_the_work(tmp_path: Path) -> None:
    lines: list[str] = []
    build_index(random_facts(600), HashEncoder(64), "ivf", tmp_path / "index", announce=lines.append)
    assert lines[0].startswith("600 passages: IVF9,Flat, trained on 576, nprobe 8; beside the encoder about")
    assert lines[1:] == ["training on 576 vectors", "adding 600 vectors"]


def test_a_corpus_file_and_the_same_passages_in_memory_give_one_index(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"id": "a", "title": "T", "text": "x y"}\n{"id": "b", "text": "z"}\n')
    passages = [Document("a", "T", "x y"), Document("b", "", "z")]
    from_file = build_index(tmp_path / "c.jsonl", HashEncoder(64), "flat", tmp_path / "file")
    assert from_file.files == build_index(passages, HashEncoder(64), "flat", tmp_path / "memory").files
    assert FileStamp.of(tmp_path / "file" / "vectors.faiss") == from_file.files["vectors.faiss"]
    assert from_file.sources == stamp_sources(tmp_path / "c.jsonl", None)
