"""Searches kept in a file, so that a rollout can be repeated without an index (`retrieval.mode: record | replay`).

    Recorder (one a process) ──▶ searches.arrow.parts/<process>.arrows ──merge_record──▶ searches.arrow ──▶ Replay

    writes       each search as it is answered, straight to the file: a process that dies loses none that it gave away
    merge        at the end of the run; written beside and renamed. Parts of a run that died are merged by the next run
                 in that folder, and a replay reads them as they are
    on failure   replay: DataError that names the query; it is not asked again

The run folder must be seen by all nodes, as for the logs. A search is one row: query, k, index, passages.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from mempo_ray.contracts import Passage
from mempo_ray.errors import DataError
from mempo_ray.ports import Search

log = logging.getLogger(__name__)

PASSAGE = pa.struct([("id", pa.string()), ("title", pa.string()), ("text", pa.string()), ("score", pa.float64())])
PART_SCHEMA = pa.schema([("query", pa.string()), ("top_k", pa.int32()), ("passages", pa.list_(PASSAGE))])
SCHEMA = pa.schema([*PART_SCHEMA, ("index_id", pa.string())])


def parts_of(record: Path) -> Path:
    """The folder of the parts that become `record`."""
    return record.with_name(record.name + ".parts")


class Recorder:
    """`ports.Search` that writes down what another one found, and keeps none of it in memory.

    `SharedSearch` stands before it, so that equal queries see the passages that were written. Where one is asked again
    long after, it is written again; the merge keeps the first, and says so where the passages differ.
    """

    def __init__(self, search: Search, record: Path) -> None:
        self._search, self._parts = search, parts_of(record)
        self._writer: pa.RecordBatchStreamWriter | None = None

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Raises as the other one; what failed is not recorded."""
        found = await self._search(queries, top_k)
        rows = [
            {"query": query, "top_k": top_k, "passages": [_row(passage) for passage in passages]}
            for query, passages in zip(queries, found, strict=True)
        ]
        if self._writer is None:
            self._parts.mkdir(parents=True, exist_ok=True)
            sink = pa.OSFile(str(self._parts / f"{uuid.uuid4().hex}.arrows"), "wb")  # unbuffered
            self._writer = pa.ipc.new_stream(sink, PART_SCHEMA)
        self._writer.write_batch(pa.RecordBatch.from_pylist(rows, PART_SCHEMA))
        return found


class Replay:
    """`ports.Search` over a record.

    Raises:
        DataError: there is no record, or it cannot be read.
    """

    def __init__(self, record: Path) -> None:
        self._record = record
        self._table = read_record(record)
        keys = zip(self._table["query"].to_pylist(), self._table["top_k"].to_pylist(), strict=True)
        self._rows = {key: row for row, key in enumerate(keys)}

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Raises DataError, naming the query that is not in the record."""
        return [self._find(query, top_k) for query in queries]

    def _find(self, query: str, top_k: int) -> list[Passage]:
        row = self._rows.get((query, top_k))
        if row is None:
            raise DataError(
                f"retrieval.record: {self._record} holds no search for {query!r} with k={top_k}: this run asks "
                "something else than the recorded one; use its configuration and seed, or retrieval.mode=live"
            )
        return [Passage(**passage) for passage in self._table["passages"][row].as_py()]


def read_record(record: Path) -> pa.Table:
    """The merged file and whatever parts lie beside it, each (query, k) once.

    Raises:
        DataError: there is neither, or the file is damaged.
    """
    tables = [_read_merged(record)] if record.is_file() else []
    tables += [_read_part(part) for part in sorted(parts_of(record).glob("*.arrows"))]
    if not tables:
        raise DataError(f"retrieval.record: there is no record {record}; make one with retrieval.mode=record")
    return _distinct(pa.concat_tables(tables))


def merge_record(record: Path, index_id: str) -> None:
    """Make one file of the parts, together with what the file holds already. No parts: nothing happens."""
    parts = parts_of(record)
    if not parts.is_dir():
        return
    table = read_record(record)
    named = pa.array([known or index_id for known in table["index_id"].to_pylist()], pa.string())
    table = table.set_column(table.schema.get_field_index("index_id"), "index_id", named).sort_by("query")
    beside = record.with_name(f".{record.name}.{os.getpid()}")
    with pa.OSFile(str(beside), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(table)
    beside.rename(record)
    shutil.rmtree(parts)


def _read_merged(record: Path) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.memory_map(str(record))).read_all().select(SCHEMA.names).cast(SCHEMA)
    except (pa.ArrowInvalid, KeyError, ValueError) as error:
        raise DataError(
            f"retrieval.record: {record} cannot be read as recorded searches ({error}); record again"
        ) from error


def _read_part(part: Path) -> pa.Table:
    """The searches of one process, up to the one that it was writing when it died."""
    batches: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(pa.OSFile(str(part), "rb")) as reader:
            batches.extend(iter(reader))
    except (pa.ArrowInvalid, OSError) as error:
        log.warning("retrieval.record: %s ends in the middle of a search: %s", part, error)
    table = pa.Table.from_batches(batches, PART_SCHEMA)
    return table.append_column("index_id", pa.nulls(len(table), pa.string()))


def _distinct(table: pa.Table) -> pa.Table:
    """The first row of each (query, k). Others may hold different passages; that is said, not hidden."""

    def ids(row: int) -> list[str]:
        return [passage["id"] for passage in table["passages"][row].as_py()]

    first: dict[tuple[str, int], int] = {}
    differing = []
    for row, key in enumerate(zip(table["query"].to_pylist(), table["top_k"].to_pylist(), strict=True)):
        if (earlier := first.setdefault(key, row)) != row and ids(earlier) != ids(row):
            differing.append(key[0])
    if differing:
        log.warning("retrieval.record: %d queries found different passages when they were asked again, or by two "
                    "processes, such as %r; the replay gives the first", len(differing), differing[0])  # fmt: skip
    return table.take(list(first.values()))


def _row(passage: Passage) -> dict[str, object]:
    return {"id": passage.id, "title": passage.title, "text": passage.text, "score": passage.score}
