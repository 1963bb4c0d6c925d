"""A build that is killed, or that meets another one."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from retrieval_index.build import build_index, stamp_sources
from retrieval_index.corpus import Document
from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import BuildError, BuildRunning, CorpusError
from retrieval_index.manifest import Manifest, load, verify
from retrieval_index.partial_folder import partial_folder
from retrieval_index.plan import Tuning
from retrieval_index.vector_file import ROWS_PER_SLICE

from .conftest import facts

NUM_SLICES, PATIENCE_S = 3, 120.0
CORPUS = [Document(f"d{i}", "", f"mentor n{i} n{i * 7 % 2500} .") for i in range(NUM_SLICES * ROWS_PER_SLICE - 100)]


class Killed(BaseException):
    """Stands for the end of the process."""


class MortalEncoder(HashEncoder):
    """Encodes this many slices, then dies; remembers how many passages it has encoded."""

    def __init__(self, lifetime: int) -> None:
        super().__init__(64)
        self._lifetime, self.encoded = lifetime, 0

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        if self._lifetime == 0:
            raise Killed
        self._lifetime -= 1
        self.encoded += len(texts)
        return super().encode_passages(texts)


def die_after(slices: int, out: Path, corpus: Sequence[Document] = CORPUS, kind: str = "flat") -> None:
    with pytest.raises(Killed):
        build_index(corpus, MortalEncoder(slices), kind, out)


@pytest.mark.parametrize("kind", ["flat", "ivf", "hybrid"])
def test_a_killed_build_goes_on_and_gives_the_same_files(tmp_path: Path, kind: str) -> None:
    whole = build_index(CORPUS, HashEncoder(64), kind, tmp_path / "whole")
    die_after(2, tmp_path / "index", kind=kind)
    encoder = MortalEncoder(NUM_SLICES)
    assert build_index(CORPUS, encoder, kind, tmp_path / "index") == whole
    assert encoder.encoded == len(CORPUS) - 2 * ROWS_PER_SLICE, "two slices were there already"
    assert verify(tmp_path / "index").files == whole.files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "whole"]


def test_passages_read_from_a_file_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "corpus.tsv"
    path.write_text("id\ttext\ttitle\n" + "".join(f"{d.id}\t{d.text}\t\n" for d in CORPUS))
    with pytest.raises(Killed):
        build_index(path, MortalEncoder(1), "flat", tmp_path / "index")
    passages = tmp_path / ".index.partial" / "passages.arrow"
    written = passages.stat().st_mtime_ns
    encoder = MortalEncoder(NUM_SLICES)
    build_index(path, encoder, "flat", tmp_path / "index")
    assert (tmp_path / "index" / "passages.arrow").stat().st_mtime_ns == written
    assert encoder.encoded == len(CORPUS) - ROWS_PER_SLICE


def test_another_encoder_corpus_or_kind_does_not_delete_what_a_killed_build_has_encoded(tmp_path: Path) -> None:
    die_after(2, tmp_path / "index")
    np.save(tmp_path / "v.npy", np.zeros((len(CORPUS), 64), np.float32))
    others = [(CORPUS, HashEncoder(128), "flat", None), (facts(), HashEncoder(64), "flat", None),
              (CORPUS, None, "bm25", None), (CORPUS, HashEncoder(64), "flat", tmp_path / "v.npy")]  # fmt: skip
    for corpus, encoder, kind, embeddings in others:
        with pytest.raises(BuildError, match=r"out: .*partial holds 2 slices of 1024 passages"):
            build_index(corpus, encoder, kind, tmp_path / "index", embeddings=embeddings)
    encoder = MortalEncoder(NUM_SLICES)
    build_index(CORPUS, encoder, "flat", tmp_path / "index")
    assert encoder.encoded == len(CORPUS) - 2 * ROWS_PER_SLICE


def test_a_corpus_that_changed_in_between_is_encoded_anew_if_the_build_may_overwrite(tmp_path: Path) -> None:
    die_after(2, tmp_path / "index")
    changed = [Document("d0", "", "boss n0 n1 ."), *CORPUS[1:]]
    encoder = MortalEncoder(NUM_SLICES)
    manifest = build_index(changed, encoder, "flat", tmp_path / "index", overwrite=True)
    assert encoder.encoded == len(CORPUS)
    assert manifest.files == build_index(changed, HashEncoder(64), "flat", tmp_path / "whole").files


def test_a_corpus_that_changes_while_it_is_encoded_leaves_an_index_that_is_out_of_date(tmp_path: Path) -> None:
    path = tmp_path / "corpus.tsv"
    path.write_text("id\ttext\nd0\tmentor n0 n1 .\n")
    before = stamp_sources(path, None)

    def change(done: int, total: int) -> None:
        path.write_text("id\ttext\nd0\tboss n0 n1 .\n")

    manifest = build_index(path, HashEncoder(64), "flat", tmp_path / "index", progress=change)
    assert manifest.sources == before != stamp_sources(path, None)


def test_a_slip_of_the_user_costs_no_vector_of_a_killed_build(tmp_path: Path) -> None:
    die_after(2, tmp_path / "index")
    with pytest.raises(CorpusError, match="there is no file"):
        build_index(tmp_path / "typo.tsv", HashEncoder(64), "flat", tmp_path / "index")
    with pytest.raises(BuildError, match="use at most"):
        build_index(CORPUS, HashEncoder(64), "ivf", tmp_path / "index", tuning=Tuning(nlist=len(CORPUS) + 1))
    encoder = MortalEncoder(NUM_SLICES)
    build_index(CORPUS, encoder, "flat", tmp_path / "index")
    assert encoder.encoded == len(CORPUS) - 2 * ROWS_PER_SLICE


def test_another_kind_takes_the_vectors_and_nothing_else_of_a_killed_build(tmp_path: Path) -> None:
    die_after(2, tmp_path / "index")
    folder = tmp_path / ".index.partial"
    (folder / "bm25").mkdir()
    (folder / "bm25" / "left.npy").write_bytes(b"x")
    (folder / "vectors.faiss").write_bytes(b"half an index")
    encoder = MortalEncoder(NUM_SLICES)
    manifest = build_index(CORPUS, encoder, "flat", tmp_path / "index")
    assert encoder.encoded == len(CORPUS) - 2 * ROWS_PER_SLICE
    assert set(manifest.files) == {"passages.arrow", "vectors.faiss"}


def test_hnsw_is_the_same_each_time_when_it_is_asked_for(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((3000, 16), dtype=np.float32)
    np.save(tmp_path / "v.npy", vectors)
    corpus = [Document(str(i), "", "x") for i in range(3000)]

    def built(name: str) -> Manifest:
        return build_index(
            corpus, HashEncoder(16), "hnsw", tmp_path / name, embeddings=tmp_path / "v.npy", deterministic=True
        )

    assert built("a").files == built("b").files


def test_bad_input_leaves_nothing_behind_and_a_lost_build_stays(tmp_path: Path) -> None:
    with pytest.raises(CorpusError):
        build_index([*facts(), facts()[0]], HashEncoder(64), "flat", tmp_path / "index")
    with pytest.raises(BuildError, match="use at most 24"):
        build_index(facts(), HashEncoder(64), "ivf", tmp_path / "index", tuning=Tuning(nlist=25))
    assert list(tmp_path.iterdir()) == []
    die_after(1, tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == [".index.partial"]


def test_the_second_of_two_builds_of_one_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "index") as first:
        (first / "work").write_text("of the first")
        with pytest.raises(BuildRunning, match=r"another process is building .*index \(wait for it"):
            build_index(facts(), HashEncoder(), "flat", tmp_path / "index")
        assert (first / "work").is_file()
        build_index(facts(), HashEncoder(), "flat", tmp_path / "another")
    build_index(facts(), HashEncoder(), "flat", tmp_path / "index")
    assert load(tmp_path / "index").count == len(facts())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "ivf", "ivfpq"])
def test_a_process_killed_at_random_points_ends_with_the_same_checksums(tmp_path: Path, kind: str) -> None:
    path, count = tmp_path / "corpus.tsv", 20_000
    path.write_text("id\ttext\n" + "".join(f"d{i}\tmentor n{i} n{i * 7 % count} .\n" for i in range(count)))
    num_slices = -(-count // ROWS_PER_SLICE)

    def start(out: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "retrieval_index", "build", "--corpus", path, "--out", tmp_path / out]
        options = ["--encoder", "hash", "--dim", "64", "--kind", kind, "--nlist", "64", "--pq-bytes", "4"]
        return subprocess.Popen([*map(str, command), *options], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def slices_done() -> int:
        return sum(sum(marks.read_bytes()) for marks in (tmp_path / ".index.partial").glob("vectors-*.done"))

    assert start("whole").wait(PATIENCE_S) == 0
    rng = np.random.default_rng()
    for until in sorted(rng.integers(0, num_slices, 3).tolist()):
        process = start("index")
        kill_when(process, lambda until=until: slices_done() > until)
        assert slices_done() > until, "what is marked stays marked"
    assert start("index").wait(PATIENCE_S) == 0
    assert load(tmp_path / "index") == load(tmp_path / "whole")
    verify(tmp_path / "index")


def kill_when(process: subprocess.Popen, reached: Callable[[], bool]) -> None:
    """Look every 10 ms; a process that ends by itself, or never gets there, fails the test."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline_s
        with suppress(subprocess.TimeoutExpired):
            pytest.fail(f"the build ended with {process.wait(0.01)} before it could be killed")
    process.kill()
    process.wait(10)
