"""`Batch`: the DataProto-like container that travels through the object store.

Three kinds of columns, one row axis `S`:

    ragged    token ids, log-probs, masks     one flat numpy array + int64 offsets (the layout of an Arrow list)
    fixed     numeric, one value a row        numpy [S, ...]
    table     ids, texts, reasons             one pyarrow.Table with S rows

plus `meta`: small, typed values that belong to the whole batch. Numpy arrays and Arrow buffers are read
from Ray's object store without a copy and read-only; no padding ever crosses a process (`to_padded` is
for the rank that needs a rectangle). Operations are named as DataProto's users know them (verl).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mempo_ray.errors import DataError


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length: `values[offsets[i]:offsets[i+1]]` is row i. `offsets` is int64 [S+1]."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence | np.ndarray], dtype: np.dtype | type) -> Self:
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        values = np.concatenate([np.asarray(row, dtype) for row in rows]) if len(rows) else np.empty(0, dtype)
        return cls(values.astype(dtype, copy=False), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [S], the number of values in each row."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Ragged:
        return Ragged.from_rows([self[int(i)] for i in rows], self.values.dtype)

    def slice(self, start: int, stop: int) -> Ragged:
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])


@dataclass(frozen=True)
class Column:
    """Declaration of a column of a typed batch: `kind` is ragged | fixed | table."""

    kind: str
    dtype: np.dtype | pa.DataType
    meaning: str


@dataclass(frozen=True, eq=False)
class Batch:
    """Columns over one row axis. Immutable: operations return new batches that share memory where they can.

    A typed subclass declares `SCHEMA`; it is checked once, where the batch is made.

    Raises:
        DataError: a column is missing, has another dtype or another number of rows; names the column.
    """

    ragged: Mapping[str, Ragged] = field(default_factory=dict)
    fixed: Mapping[str, np.ndarray] = field(default_factory=dict)
    table: pa.Table = field(default_factory=lambda: pa.table({}))
    meta: Mapping[str, object] = field(default_factory=dict)

    SCHEMA: ClassVar[Mapping[str, Column]] = {}

    def __post_init__(self) -> None:
        names = [*self.ragged, *self.fixed, *self.table.column_names]
        if len(set(names)) != len(names):
            raise DataError(f"{type(self).__name__}: a column name stands in two kinds: {sorted(names)}")
        lengths = {n: len(c) for n, c in [*self.ragged.items(), *self.fixed.items()]}
        lengths |= dict.fromkeys(self.table.column_names, self.table.num_rows)
        if len(set(lengths.values())) > 1:
            raise DataError(f"{type(self).__name__}: columns differ in rows: {lengths}")
        self._check_schema()

    def _check_schema(self) -> None:
        for name, column in self.SCHEMA.items():
            if column.kind == "ragged":
                found = self.ragged[name].values.dtype if name in self.ragged else None
            elif column.kind == "fixed":
                found = self.fixed[name].dtype if name in self.fixed else None
            else:
                found = self.table.schema.field(name).type if name in self.table.column_names else None
            if found != column.dtype:
                raise DataError(
                    f"{type(self).__name__}.{name}: expected {column.kind} {column.dtype}, "
                    f"got {found if found is not None else 'no such column'} ({column.meaning})"
                )

    def __len__(self) -> int:
        for columns in (self.ragged, self.fixed):
            for column in columns.values():
                return len(column)
        return self.table.num_rows

    @property
    def columns(self) -> list[str]:
        return [*self.ragged, *self.fixed, *self.table.column_names]

    @property
    def num_bytes(self) -> int:
        ragged = sum(c.values.nbytes + c.offsets.nbytes for c in self.ragged.values())
        return ragged + sum(c.nbytes for c in self.fixed.values()) + self.table.nbytes

    def strings(self, column: str) -> list:
        """The values of a table column as Python objects."""
        return self.table.column(column).to_pylist()

    # -- rows -----------------------------------------------------------------------------------------

    def take(self, rows: Iterable[int]) -> Self:
        """Rows by index, in the given order (copies)."""
        index = np.fromiter(rows, np.int64)
        return self._like(
            {n: c.take(index) for n, c in self.ragged.items()},
            {n: c[index] for n, c in self.fixed.items()},
            self.table.take(pa.array(index)) if self.table.num_columns else self.table,
        )

    def slice(self, start: int, stop: int) -> Self:
        """Rows start … stop-1 (views)."""
        return self._like(
            {n: c.slice(start, stop) for n, c in self.ragged.items()},
            {n: c[start:stop] for n, c in self.fixed.items()},
            self.table.slice(start, stop - start),
        )

    def chunk(self, num_chunks: int) -> list[Self]:
        """`num_chunks` consecutive parts whose sizes differ by at most one."""
        borders = [len(self) * i // num_chunks for i in range(num_chunks + 1)]
        return [self.slice(a, b) for a, b in itertools.pairwise(borders)]

    def repeat(self, times: int, *, interleave: bool = True) -> Self:
        """Each row `times` times: a a b b (interleave, as siblings of a group) or a b a b."""
        rows = np.arange(len(self))
        return self.take(np.repeat(rows, times) if interleave else np.tile(rows, times))

    def group_by(self, column: str) -> dict[object, Self]:
        """Rows by the value of a fixed or table column, in order of first appearance."""
        keys = self.fixed[column].tolist() if column in self.fixed else self.strings(column)
        groups: dict[object, list[int]] = {}
        for row, key in enumerate(keys):
            groups.setdefault(key, []).append(row)
        return {key: self.take(rows) for key, rows in groups.items()}

    # -- columns --------------------------------------------------------------------------------------

    def select(self, columns: Iterable[str]) -> Batch:
        """A plain `Batch` of the named columns."""
        wanted = list(columns)
        unknown = set(wanted) - set(self.columns)
        if unknown:
            raise DataError(f"no column {sorted(unknown)}; there are {self.columns}")
        return Batch(
            {n: c for n, c in self.ragged.items() if n in wanted},
            {n: c for n, c in self.fixed.items() if n in wanted},
            self.table.select([n for n in self.table.column_names if n in wanted]),
            self.meta,
        )

    def union(self, other: Batch) -> Batch:
        """Columns of both, as a plain `Batch`. A name in both must hold equal values.

        Raises:
            DataError: same name, other values; or other number of rows.
        """
        shared = set(self.columns) & set(other.columns)
        for name in shared:
            if not _equal(self, other, name):
                raise DataError(f"union: column {name!r} differs between the two batches")
        extra = other.select([n for n in other.columns if n not in shared])
        table = self.table
        for name in extra.table.column_names:
            table = table.append_column(name, extra.table.column(name))
        return Batch({**self.ragged, **extra.ragged}, {**self.fixed, **extra.fixed}, table, {**self.meta, **other.meta})

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """Rows of all, in order. `meta` is taken from the first."""
        first = batches[0]
        ragged = {
            n: Ragged(
                np.concatenate([b.ragged[n].values for b in batches]),
                np.concatenate([[0], np.cumsum(np.concatenate([b.ragged[n].lengths for b in batches]))]).astype(
                    np.int64
                ),
            )
            for n in first.ragged
        }
        fixed = {n: np.concatenate([b.fixed[n] for b in batches]) for n in first.fixed}
        return first._like(ragged, fixed, pa.concat_tables([b.table for b in batches]))

    def to_padded(self, column: str, *, side: str = "right", fill: float = 0) -> np.ndarray:
        """A ragged column as a rectangle [S, longest], padded on `side` (left | right) with `fill`."""
        source = self.ragged[column]
        width = int(source.lengths.max(initial=0))
        out = np.full((len(source), width), fill, source.values.dtype)
        for row in range(len(source)):
            values = source[row]
            start = width - len(values) if side == "left" else 0
            out[row, start : start + len(values)] = values
        return out

    # -- files ----------------------------------------------------------------------------------------

    def to_arrow(self) -> pa.Table:
        """One Arrow table; ragged columns become lists without a copy of their values."""
        columns = {
            n: pa.LargeListArray.from_arrays(pa.array(c.offsets), pa.array(c.values)) for n, c in self.ragged.items()
        }
        columns |= {n: _fixed_array(c) for n, c in self.fixed.items()}
        columns |= {n: self.table.column(n) for n in self.table.column_names}
        return pa.table(columns)

    @classmethod
    def from_arrow(cls, table: pa.Table) -> Self:
        """What `to_arrow` made of a batch. A typed batch takes its own columns and leaves the others.

        Raises:
            DataError: a column of the schema is missing or of another type.
        """
        table = table.select([n for n in table.column_names if n in cls.SCHEMA]) if cls.SCHEMA else table
        table = table.combine_chunks()
        ragged, fixed = {}, {}
        for name, kind in zip(table.column_names, table.schema.types, strict=True):
            column = table.column(name).combine_chunks()
            if pa.types.is_large_list(kind):
                offsets = column.offsets.to_numpy()
                ragged[name] = Ragged(column.values.to_numpy()[: offsets[-1]], offsets)
            elif pa.types.is_fixed_size_list(kind):
                fixed[name] = column.values.to_numpy().reshape(-1, kind.list_size)
            elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
                fixed[name] = column.to_numpy(zero_copy_only=False)
        others = [n for n in table.column_names if n not in ragged and n not in fixed]
        return cls(ragged, fixed, table.select(others))

    def to_parquet(self, path: Path | str) -> None:
        pq.write_table(self.to_arrow(), path)

    def _like(self, ragged: Mapping, fixed: Mapping, table: pa.Table) -> Self:
        return type(self)(ragged, fixed, table, self.meta)


def _fixed_array(values: np.ndarray) -> pa.Array:
    """[S] as numbers, [S, n] as fixed-size lists."""
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _equal(a: Batch, b: Batch, name: str) -> bool:
    if name in a.ragged and name in b.ragged:
        x, y = a.ragged[name], b.ragged[name]
        return np.array_equal(x.offsets, y.offsets) and np.array_equal(x.values, y.values)
    if name in a.fixed and name in b.fixed:
        return np.array_equal(a.fixed[name], b.fixed[name])
    if name in a.table.column_names and name in b.table.column_names:
        return a.table.column(name).equals(b.table.column(name))
    return False
