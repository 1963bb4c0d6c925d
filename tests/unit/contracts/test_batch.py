"""`Ragged` and `Batch`: operations keep rows, and mistakes are named where the batch is made."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.contracts import Batch, Ragged
from mempo_ray.errors import DataError

token_rows = st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8)


def batch(rows: list[list[int]], meta: dict | None = None) -> Batch:
    return Batch(
        {"ids": Ragged.from_rows(rows, np.int32)},
        {"length": np.array([len(row) for row in rows], np.int64)},
        pa.table({"key": pa.array([str(len(row)) for row in rows], pa.string())}),
        meta or {},
    )


def rows_of(found: Batch) -> list[list[int]]:
    """The ragged rows, after a check that the other two kinds of columns went with them."""
    rows = [found.ragged["ids"][i].tolist() for i in range(len(found))]
    assert found.fixed["length"].tolist() == [len(row) for row in rows]
    assert found.strings("key") == [str(len(row)) for row in rows]
    return rows


@given(token_rows)
def test_rows_come_back_as_they_were_given(rows):
    assert rows_of(batch(rows)) == rows
    assert batch(rows).ragged["ids"].lengths.tolist() == [len(row) for row in rows]


@given(token_rows, st.data())
def test_take_and_slice_are_list_operations(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert rows_of(batch(rows).take(index)) == [rows[i] for i in index]
    assert rows_of(batch(rows).slice(start, stop)) == rows[start:stop]


@given(token_rows, st.integers(1, 5))
def test_chunks_are_nearly_equal_and_concat_undoes_them(rows, num_chunks):
    chunks = batch(rows).chunk(num_chunks)
    assert len(chunks) == num_chunks
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert rows_of(Batch.concat(chunks)) == rows


@given(token_rows)
def test_groups_hold_every_row_once_in_order(rows):
    groups = batch(rows).group_by("key")
    assert list(groups) == list(dict.fromkeys(str(len(row)) for row in rows))
    for key, group in groups.items():
        assert rows_of(group) == [row for row in rows if str(len(row)) == key]
    assert list(batch(rows).group_by("length")) == [int(key) for key in groups]


def test_repeat_interleaves_siblings_or_tiles():
    assert rows_of(batch([[1], [2, 2]]).repeat(2)) == [[1], [1], [2, 2], [2, 2]]
    assert rows_of(batch([[1], [2, 2]]).repeat(2, interleave=False)) == [[1], [2, 2], [1], [2, 2]]


@given(token_rows, st.sampled_from(["left", "right"]))
def test_padding_adds_only_the_fill_on_its_side(rows, side):
    padded = batch(rows).to_padded("ids", side=side, fill=-1)
    assert padded.shape == (len(rows), max(map(len, rows), default=0))
    for row, values in zip(padded.tolist(), rows, strict=True):
        pad = [-1] * (len(row) - len(values))
        assert row == (pad + values if side == "left" else values + pad)


def test_slices_share_memory():
    whole = batch([[1, 2], [3], [4, 5]])
    assert np.shares_memory(whole.slice(1, 3).ragged["ids"].values, whole.ragged["ids"].values)


def test_ragged_index_counts_from_either_end_and_stops_there():
    ragged = Ragged.from_rows([[1], [2, 3]], np.int32)
    assert ragged[-1].tolist() == [2, 3]
    with pytest.raises(IndexError):
        ragged[2]
    assert sum(len(row) for row in ragged) == 3


@given(token_rows)
def test_select_and_union_are_inverse(rows):
    whole = batch(rows, {"step": 3})
    joined = whole.select(["ids", "key"]).union(whole.select(["length", "key"]))
    assert rows_of(joined) == rows
    assert joined.meta == {"step": 3}


def test_union_refuses_a_name_with_two_values():
    with pytest.raises(DataError, match="'ids' differs"):
        batch([[1]]).union(Batch({"ids": Ragged.from_rows([[2]], np.int32)}))


def test_select_names_the_unknown_column():
    with pytest.raises(DataError, match="idz"):
        batch([[1]]).select(["idz"])


def test_columns_of_unequal_rows_or_one_name_in_two_kinds_are_refused():
    with pytest.raises(DataError, match="differ in rows"):
        Batch({"ids": Ragged.from_rows([[1]], np.int32)}, {"x": np.zeros(2)})
    with pytest.raises(DataError, match="two kinds"):
        Batch({"x": Ragged.from_rows([[1]], np.int32)}, {"x": np.zeros(1)})


def test_a_batch_without_rows_keeps_its_columns():
    empty = batch([])
    assert (len(empty), empty.num_bytes > 0, empty.columns) == (0, True, ["ids", "length", "key"])
    assert len(empty.take([])) == 0


def test_parquet_keeps_lists_numbers_and_texts(tmp_path):
    batch([[1, 2], []]).to_parquet(tmp_path / "b.parquet")
    table = pq.read_table(tmp_path / "b.parquet")
    assert table.to_pydict() == {"ids": [[1, 2], []], "length": [2, 0], "key": ["2", "0"]}
