"""Passages: read from JSONL, TSV or Parquet, kept in one Arrow file with random access.

    corpus.jsonl[.gz] | .tsv[.gz] | .parquet ──read_corpus──▶ (line, Document) ──write_passages──▶ passages.arrow
                                                                         PassageStore (memory-mapped) ◀──┘

Two spellings of a row are understood: `{"id", "title", "text"}`, and `{"id", "contents"}` of FlashRAG and
Search-R1, whose first line is the title. A TSV has a header that names its columns, as DPR's `id, text, title`.
Row i of the Arrow file is row i of the vectors.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from retrieval_index.errors import CorpusError

ROWS_PER_BATCH = 16_384
SCHEMA = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string())])


class DocumentLike(Protocol):
    """Anything with these three strings can be indexed."""

    @property
    def id(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Document:
    """One passage of a corpus. `title` may be empty."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Passage:
    """One search result. `score`: inner product (of unit vectors: in [-1, 1]), BM25, or reciprocal rank sum.

    Example: `Passage(id="p12", title="Sari", text="mentor Boko Sari .", score=0.82)`
    """

    id: str
    title: str
    text: str
    score: float


def embedding_text(title: str, text: str) -> str:
    """What the encoder sees of a passage: `title + ". " + text`, or the text alone."""
    return f"{title}. {text}" if title else text


def read_corpus(path: str | Path) -> Iterator[tuple[int, Document]]:
    """Yield (line or row number from 1, document) of a `.jsonl`, `.tsv` (either also `.gz`) or `.parquet` file.

    Raises:
        CorpusError: the file is missing or of another kind, or a line is not a passage (named by its number).
    """
    path = Path(path)
    rows = read_rows(path)
    return ((number, _document(row, path, number)) for number, row in rows)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, row) of a JSONL, TSV or Parquet file. Blank lines are skipped, but counted."""
    if not path.is_file():
        raise CorpusError(f"there is no file {path}", "corpus", "check the path")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz")):
        return _jsonl_rows(path)
    if path.name.endswith((".tsv", ".tsv.gz")):
        return _tsv_rows(path)
    raise CorpusError(f"{path} is no .jsonl, .tsv (also .gz) or .parquet file", "corpus", "convert it to one of these")


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line with its end), of a plain or gzip file."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield number, line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise _bad_line(path, number, f"it is not UTF-8 at byte {error.start}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorpusError(
            f"{path} cannot be unpacked after line {number}: {error}", "corpus", "fetch it again"
        ) from error


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((number, _object(line, path, number)) for number, line in _text_lines(path) if line.strip())


def _tsv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = csv.reader((line for _, line in _text_lines(path)), delimiter="\t")
    header = next(rows, [])
    if not {"id", "text"} <= set(header):
        raise _bad_line(path, 1, f"the header must name `id` and `text`, and may name `title`; it is {header}")
    try:
        for row in rows:
            if len(row) not in (0, len(header)):
                raise _bad_line(path, rows.line_num, f"it has {len(row)} fields, the header {len(header)}")
            if row:
                yield rows.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise _bad_line(path, rows.line_num, str(error)) from error


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise _bad_line(path, number, f"it is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _bad_line(path, number, f"it is a JSON {type(row).__name__}, not an object")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise CorpusError(f"{path} is not a Parquet file: {error}", "corpus", "fetch it again") from error
    wanted = [name for name in ("id", "title", "text", "contents") if name in file.schema_arrow.names]
    number = 0
    try:
        for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read after row {number}: {error}", "corpus", "fetch it again") from error


def _document(row: dict[str, Any], path: Path, number: int) -> Document:
    identity = row.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise _bad_line(path, number, "it has no `id` (a string or a whole number)")
    if "text" in row:
        title, text = row.get("title") or "", row["text"]
    elif isinstance(row.get("contents"), str):
        head, _, text = row["contents"].partition("\n")
        title = head.strip().strip('"')
    else:
        raise _bad_line(path, number, "it has neither `text` nor `contents`")
    if not (isinstance(title, str) and isinstance(text, str)):
        raise _bad_line(path, number, "`title` and `text` must be strings")
    try:
        f"{identity}{title}{text}".encode()
    except UnicodeEncodeError as error:
        raise _bad_line(path, number, "it escapes half of a surrogate pair, which UTF-8 cannot hold") from error
    return Document(str(identity), title, text)


def _bad_line(path: Path, number: int, problem: str) -> CorpusError:
    return CorpusError(f"{path}, line {number}: {problem}", "corpus", "mend or remove that line")


def write_passages(numbered: Iterable[tuple[int, DocumentLike]], path: Path, source: str) -> int:
    """Write the documents to an Arrow file and return how many there were.

    Beside one batch it keeps 16 bytes a passage, to find ids that occur twice.

    Args:
        numbered: (line number, document), in the order of the vectors.
        source: names the corpus in messages.

    Raises:
        CorpusError: two documents have one id (both lines are named), or there is none at all.
    """
    numbers, hashes = array("q"), array("q")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        pending: list[DocumentLike] = []
        for number, document in numbered:
            numbers.append(number)
            hashes.append(hash(document.id))
            pending.append(document)
            if len(pending) == ROWS_PER_BATCH:
                writer.write_batch(_record_batch(pending))
                pending = []
        if pending:
            writer.write_batch(_record_batch(pending))
    if not numbers:
        raise CorpusError(f"{source} holds no passage", "corpus", "give a corpus with at least one")
    _refuse_equal_ids(PassageStore(path), np.frombuffer(hashes, np.int64), numbers, source)
    return len(numbers)


def _refuse_equal_ids(store: PassageStore, hashes: np.ndarray, numbers: Sequence[int], source: str) -> None:
    ordered = np.sort(hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    first_seen: dict[str, int] = {}
    for row in np.flatnonzero(np.isin(hashes, repeated)).tolist():  # equal hashes are nearly always equal ids
        identity = store[row].id
        if (first := first_seen.setdefault(identity, row)) != row:
            raise CorpusError(
                f"{source}, line {numbers[row]}: id {identity!r} was already used on line {numbers[first]}",
                "corpus",
                "give each passage its own id",
            )


def _record_batch(documents: Sequence[DocumentLike]) -> pa.RecordBatch:
    columns = [[getattr(document, name) for document in documents] for name in SCHEMA.names]
    return pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=SCHEMA)


class PassageStore:
    """Random access to a passages file by row. Memory-mapped: opening it reads no passage."""

    def __init__(self, path: Path) -> None:
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, row: int) -> Document:
        return Document(*(column[row].as_py() for column in self._table.columns))

    def passages(self, rows: Sequence[int], scores: Sequence[float]) -> tuple[Passage, ...]:
        """The passages of one query's rows, those of row -1 left out."""
        found = [(self[row], score) for row, score in zip(rows, scores, strict=True) if row >= 0]
        return tuple(Passage(hit.id, hit.title, hit.text, float(score)) for hit, score in found)

    def find(self, identities: Sequence[str]) -> list[Document | None]:
        """The passage of each id. It reads the column of ids, once for all of them: a second for 20 million."""
        wanted = pa.array([identity.encode(errors="replace") for identity in identities], pa.string())
        rows = self._table.filter(pc.field("id").isin(wanted)).to_pylist()
        found = {row["id"]: Document(**row) for row in rows}
        return [found.get(identity) for identity in identities]

    def all_texts(self) -> Iterator[str]:
        """The texts of all rows as an encoder sees them, a batch in memory at a time."""
        for start in range(0, len(self), ROWS_PER_BATCH):
            yield from self.embedding_texts(start, min(len(self), start + ROWS_PER_BATCH))

    def embedding_texts(self, start: int, stop: int) -> list[str]:
        """The texts of rows [start, stop) as the encoder sees them."""
        rows = self._table.slice(start, stop - start)
        titles, texts = rows.column("title").to_pylist(), rows.column("text").to_pylist()
        return [embedding_text(title, text) for title, text in zip(titles, texts, strict=True)]
