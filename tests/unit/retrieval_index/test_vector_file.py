from pathlib import Path

import numpy as np
import pytest

from retrieval_index.errors import BuildError
from retrieval_index.vector_file import ROWS_PER_SLICE, VectorFile

COUNT, DIM = 2 * ROWS_PER_SLICE + 5, 8


def slice_of(start: int, stop: int) -> np.ndarray:
    return np.arange(start * DIM, stop * DIM, dtype=np.float32).reshape(-1, DIM)


def test_slices_written_in_any_order_are_rows_in_order(tmp_path: Path) -> None:
    file = VectorFile(tmp_path, COUNT, DIM, "made from")
    assert file.missing() == [0, ROWS_PER_SLICE, 2 * ROWS_PER_SLICE]
    for start in reversed(file.missing()):
        file.write(start, slice_of(start, file.stop(start)))
    assert file.missing() == []
    np.testing.assert_array_equal(file.array(), slice_of(0, COUNT))


def test_what_was_written_before_a_kill_is_not_missing_after_it(tmp_path: Path) -> None:
    VectorFile(tmp_path, COUNT, DIM, "made from").write(ROWS_PER_SLICE, slice_of(0, ROWS_PER_SLICE))
    assert VectorFile(tmp_path, COUNT, DIM, "made from").missing() == [0, 2 * ROWS_PER_SLICE]


def test_vectors_of_other_passages_or_another_encoder_are_deleted_only_on_request(tmp_path: Path) -> None:
    VectorFile(tmp_path, COUNT, DIM, "made from").write(0, slice_of(0, ROWS_PER_SLICE))
    with pytest.raises(BuildError, match=r"holds 1 slices of 1024 passages.*with another encoder or"):
        VectorFile(tmp_path, COUNT, DIM, "something else")
    assert len(VectorFile(tmp_path, COUNT, DIM, "made from").missing()) == 2
    assert len(VectorFile(tmp_path, COUNT, DIM, "something else", may_delete=True).missing()) == 3
    assert len(VectorFile(tmp_path, COUNT, DIM, "made from").missing()) == 3, "nothing was lost"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_shortened_file_starts_again(tmp_path: Path) -> None:
    VectorFile(tmp_path, COUNT, DIM, "made from").write(0, slice_of(0, ROWS_PER_SLICE))
    (data,) = tmp_path.glob("*.f32")
    data.write_bytes(data.read_bytes()[:-1])
    assert len(VectorFile(tmp_path, COUNT, DIM, "made from").missing()) == 3


def test_a_slice_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="slice 0 has shape"):
        VectorFile(tmp_path, COUNT, DIM, "made from").write(0, slice_of(0, 3))
