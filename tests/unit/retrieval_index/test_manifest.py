import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import (
    DamagedIndex,
    DimensionMismatch,
    EncoderMismatch,
    ForeignVersion,
    IndexMissing,
    RetrievalIndexError,
)
from retrieval_index.manifest import check, verify


def test_a_whole_index_of_the_right_encoder_passes(index_folder: Path) -> None:
    encoder = HashEncoder()
    manifest = check(index_folder, encoder_fingerprint=encoder.fingerprint, dim=encoder.dim)
    assert manifest.encoder.name == "hash"
    assert manifest.encoder.settings == {"dim": 512}


def test_a_missing_folder_says_how_to_build_one(tmp_path: Path) -> None:
    with pytest.raises(IndexMissing, match="retrieval_index build"):
        check(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(IndexMissing):
        check(tmp_path / "file")


def test_another_encoder_is_refused_by_name_and_settings(index_folder: Path) -> None:
    with pytest.raises(EncoderMismatch, match=r"built with another encoder: 'hash' \(dim=512\)"):
        check(index_folder, encoder_fingerprint="something else")


def test_another_dimension_is_refused_before_the_fingerprint_is_compared(index_folder: Path) -> None:
    with pytest.raises(DimensionMismatch, match="dimension 512, the encoder makes 384"):
        check(index_folder, encoder_fingerprint="something else", dim=384)


def test_a_foreign_version_is_refused_even_if_its_fields_are_unknown(index_folder: Path) -> None:
    (index_folder / "manifest.json").write_text(json.dumps({"format_version": 99, "novel": 1}))
    with pytest.raises(ForeignVersion, match="format 99, this program reads format 2"):
        check(index_folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 2}', '{"format_version": 2, "files": 3}'])
def test_what_is_no_manifest_is_damaged(index_folder: Path, text: str) -> None:
    (index_folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedIndex, match="not a manifest"):
        check(index_folder)


@pytest.mark.parametrize("name", ["vectors.faiss", "passages.arrow"])
def test_a_truncated_or_missing_file_is_named_by_the_cheap_check(index_folder: Path, name: str) -> None:
    content = (index_folder / name).read_bytes()
    (index_folder / name).write_bytes(content[:-1])
    with pytest.raises(DamagedIndex, match=f"{name} has {len(content) - 1} bytes instead of {len(content)}"):
        check(index_folder)
    (index_folder / name).unlink()
    with pytest.raises(DamagedIndex, match=f"{name} is missing"):
        check(index_folder)


def test_a_flipped_byte_is_found_by_verify(index_folder: Path) -> None:
    path = index_folder / "vectors.faiss"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    check(index_folder)
    with pytest.raises(DamagedIndex, match="differs from its checksum"):
        verify(index_folder)


def test_errors_keep_field_and_remedy_through_pickling() -> None:
    error = pickle.loads(pickle.dumps(DamagedIndex("it is torn", "index", "build it again")))
    assert isinstance(error, RetrievalIndexError)
    assert (error.problem, error.field, error.remedy) == ("it is torn", "index", "build it again")
    assert str(error) == "index: it is torn (build it again)"


def test_checking_an_index_loads_neither_torch_nor_faiss(index_folder: Path) -> None:
    code = (
        "import sys; from retrieval_index.manifest import check; from retrieval_index.encoder import make_encoder;"
        f"check({str(index_folder)!r}, encoder_fingerprint=make_encoder('hash').fingerprint);"
        "print([name for name in ('torch', 'faiss', 'transformers', 'ray', 'mempo_ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
