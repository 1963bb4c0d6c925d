from dataclasses import replace
from pathlib import Path

import pytest

from retrieval_index.build import build_index
from retrieval_index.contents import verify_contents
from retrieval_index.corpus import write_passages
from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import DamagedIndex, StaleIndex
from retrieval_index.manifest import FileStamp, load

from .conftest import facts


def with_true_stamps(folder: Path) -> None:
    """Make the checksums right again after a change: only the counts can tell."""
    manifest = load(folder)
    files = {name: FileStamp.of(folder / name) for name in manifest.files}
    (folder / "manifest.json").write_text(replace(manifest, files=files).to_json())


@pytest.mark.parametrize("kind", ["flat", "bm25", "hybrid"])
def test_a_whole_index_of_any_kind_passes(tmp_path: Path, kind: str) -> None:
    manifest = build_index(facts(), HashEncoder(64), kind, tmp_path / "index")
    assert verify_contents(tmp_path / "index") == manifest


@pytest.mark.parametrize("name", ["vectors.faiss", "passages.arrow", "bm25/data.csc.index.npy"])
def test_a_flipped_byte_in_any_file_is_found(tmp_path: Path, name: str) -> None:
    build_index(facts(), HashEncoder(64), "hybrid", tmp_path / "index")
    path = tmp_path / "index" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedIndex, match=f"{name} differs from its checksum"):
        verify_contents(tmp_path / "index")


def test_parts_that_do_not_count_the_same_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    build_index(facts(), HashEncoder(64), "flat", folder)
    write_passages(enumerate(facts()[:5], start=1), folder / "passages.arrow", "less")
    with_true_stamps(folder)
    with pytest.raises(DamagedIndex, match=r"the passages of .* count 5, the manifest 24"):
        verify_contents(folder)
    build_index(facts()[:5], HashEncoder(64), "flat", tmp_path / "less")
    (folder / "vectors.faiss").write_bytes((tmp_path / "less" / "vectors.faiss").read_bytes())
    with_true_stamps(folder)
    with pytest.raises(DamagedIndex, match="holds 5 vectors of width 64, the manifest says 24 of 64"):
        verify_contents(folder)


def test_a_corpus_that_changed_since_the_build_is_stale(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "text": "x y"}\n')
    build_index(corpus, HashEncoder(64), "flat", tmp_path / "index")
    verify_contents(tmp_path / "index", corpus=corpus)
    corpus.write_text('{"id": "a", "text": "x z"}\n')
    with pytest.raises(StaleIndex, match="has changed since"):
        verify_contents(tmp_path / "index", corpus=corpus)
    with pytest.raises(StaleIndex, match=r"embeddings: .*is not what the index was built from"):
        verify_contents(tmp_path / "index", embeddings=corpus)
