import logging
from pathlib import Path

import faiss
import numpy as np
import pytest

from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import DamagedIndex, DimensionMismatch, EncoderMismatch
from retrieval_index.index import PassageIndex
from retrieval_index.manifest import VECTORS_FILE, FileStamp, Manifest, load

from .conftest import facts


def test_results_come_best_first_with_their_text_and_score(index_folder: Path) -> None:
    index = PassageIndex.open(index_folder)
    rows, scores = index.search(HashEncoder().encode_queries(["mentor Boko"]), 3)
    passages = index.passages(rows[0], scores[0])
    assert passages[0].id == "mentor-Boko"
    assert passages[0].text == "mentor Boko Sari ."
    assert [passage.score for passage in passages] == sorted((p.score for p in passages), reverse=True)
    assert 0.5 < passages[0].score <= 1


def test_a_k_larger_than_the_index_returns_everything(index_folder: Path) -> None:
    index = PassageIndex.open(index_folder)
    rows, scores = index.search(HashEncoder().encode_queries(["Boko", "Sari"]), 1000)
    assert rows.shape == scores.shape == (2, len(facts()))
    assert sorted(rows[0]) == list(range(len(facts())))


def test_rows_that_an_approximate_index_did_not_find_are_left_out(index_folder: Path) -> None:
    index = PassageIndex.open(index_folder)
    assert [p.id for p in index.passages(np.array([0, -1]), np.array([0.5, -3e38]))] == ["mentor-Boko"]


def test_vectors_of_another_width_and_another_encoder_are_refused(index_folder: Path) -> None:
    with pytest.raises(DimensionMismatch):
        PassageIndex.open(index_folder).search(np.zeros((1, 64), np.float32), 3)
    with pytest.raises(EncoderMismatch):
        PassageIndex.open(index_folder, encoder_fingerprint=HashEncoder(256).fingerprint)


def test_a_file_that_faiss_cannot_read_is_a_damaged_index(index_folder: Path) -> None:
    path = index_folder / VECTORS_FILE
    path.write_bytes(b"not a FAISS file")
    old = load(index_folder)
    fields = {name: getattr(old, name) for name in Manifest.__dataclass_fields__}
    fields["files"] = {**old.files, VECTORS_FILE: FileStamp.of(path)}
    (index_folder / "manifest.json").write_text(Manifest(**fields).to_json())
    with pytest.raises(DamagedIndex, match="FAISS cannot read"):
        PassageIndex.open(index_folder)


@pytest.mark.skipif(faiss.get_num_gpus() > 0, reason="FAISS has a GPU here: nothing to fall back from")
def test_without_a_gpu_it_falls_back_to_the_cpu_and_says_why(
    index_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="retrieval_index.gpu"):
        index = PassageIndex.open(index_folder, device="cuda")
    assert index.device.startswith("cpu (")
    assert "runs on the CPU" in caplog.text
    assert index.search(HashEncoder().encode_queries(["mentor Boko"]), 1)[0][0, 0] == 0
