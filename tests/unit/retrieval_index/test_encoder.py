import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval_index.corpus import embedding_text
from retrieval_index.encoder import HashEncoder, make_encoder, make_recorded_encoder
from retrieval_index.encoder_presets import preset_folder
from retrieval_index.errors import EncoderError
from retrieval_index.manifest import EncoderRecord

from .conftest import NAMES, facts


def ranking(query: str, passages: list[str], dim: int = 512) -> list[int]:
    encoder = HashEncoder(dim)
    scores = encoder.encode_passages(passages) @ encoder.encode_queries([query])[0]
    return list(np.argsort(-scores, kind="stable"))


def test_hash_vectors_are_float32_of_length_one_and_a_wordless_text_is_zero() -> None:
    vectors = HashEncoder(64).encode_queries(["mentor Boko", " . "])
    assert vectors.dtype == np.float32
    assert vectors.shape == (2, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0], atol=1e-6)
    assert HashEncoder(64).encode_queries([]).shape == (0, 64)


def test_hash_vectors_are_the_same_in_another_process() -> None:
    code = (
        "from retrieval_index.encoder import HashEncoder;"
        "print(HashEncoder(64).encode_passages(['mentor Boko Sari .'])[0].tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == HashEncoder(64).encode_passages(["mentor Boko Sari ."])[0].tobytes().hex()


def test_hash_tells_whose_mentor_is_asked_for() -> None:
    assert ranking("mentor Boko", ["mentor Sari Boko .", "boss Boko Sari .", "mentor Boko Sari ."])[0] == 2


def test_hash_finds_all_passages_titled_with_the_name_before_those_that_mention_it() -> None:
    documents = facts()
    texts = [embedding_text(document.title, document.text) for document in documents]
    for name in NAMES:
        assert {documents[row].title for row in ranking(name, texts)[:3]} == {name}


def test_hash_finds_every_fact_by_relation_and_name() -> None:
    documents = facts()
    texts = [embedding_text(document.title, document.text) for document in documents]
    for row, document in enumerate(documents):
        assert ranking(document.id.replace("-", " "), texts)[0] == row


def test_the_fingerprint_of_hash_depends_on_its_dimension() -> None:
    assert HashEncoder(512).fingerprint == make_encoder("hash", dim=512).fingerprint
    assert HashEncoder(512).fingerprint != HashEncoder(256).fingerprint


def test_a_dimension_that_is_no_multiple_of_8_is_refused() -> None:
    with pytest.raises(EncoderError, match="multiple of 8"):
        make_encoder("hash", dim=100)


def test_a_recorded_encoder_is_made_again_under_its_own_or_another_name(folder: Path) -> None:
    hash_record = EncoderRecord("hash", "…", {"dim": 64})
    assert make_recorded_encoder(hash_record).dim == 64
    assert make_recorded_encoder(hash_record, str(folder)).dim == 12, "of another kind: with its own settings"
    original = make_encoder(str(folder), query_prefix="query: ")
    record = EncoderRecord(original.name, original.fingerprint, original.settings)
    moved = folder.rename(folder.with_name("moved"))
    assert make_recorded_encoder(record, str(moved)).fingerprint == original.fingerprint


# --- folders: made of two small files, never loaded ----------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "encoder"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 12}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_folder_tells_dimension_pooling_and_length(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    encoder = make_encoder(str(folder), query_prefix="query: ")
    assert encoder.dim == 12
    assert encoder.settings == {
        "pooling": "cls",
        "max_length": 128,
        "query_prefix": "query: ",
        "passage_prefix": "",
        "normalised": True,
    }


def test_the_fingerprint_covers_weights_and_settings_but_not_the_path(folder: Path) -> None:
    before = make_encoder(str(folder)).fingerprint
    assert make_encoder(str(folder), query_prefix="query: ").fingerprint != before
    moved = folder.rename(folder.with_name("moved"))
    assert make_encoder(str(moved)).fingerprint == before
    (moved / "model.safetensors").write_bytes(b"other weights")
    assert make_encoder(str(moved)).fingerprint != before


@pytest.mark.parametrize(
    ("absent", "problem"),
    [("config.json", "cannot read"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no weights")],
)
def test_an_incomplete_folder_is_refused_before_torch_is_loaded(folder: Path, absent: str, problem: str) -> None:
    (folder / absent).unlink()
    with pytest.raises(EncoderError, match=problem):
        _ = make_encoder(str(folder)).fingerprint


def test_minilm_is_looked_for_in_the_models_folder_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPO_MODELS", str(tmp_path / "models"))
    (tmp_path / "models").mkdir()
    folder.rename(tmp_path / "models" / "minilm")
    assert preset_folder("minilm") == tmp_path / "models" / "minilm"


def test_a_missing_minilm_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MEMPO_MODELS", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EncoderError, match="mempo-ray fetch minilm"):
        preset_folder("minilm")
