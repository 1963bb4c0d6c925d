"""The cache that outlives a process: rows and scores of searches that were made before, in one SQLite file.

    (query, k, index id) ──get──▶ rows, scores ──Retriever.passages──▶ passages
                         ◀──put── rows, scores of a batch that was just searched

Passages are not stored: the index id in the key says that a row still means the same passage. In WAL mode several
processes of one machine share a file (not over a network file system).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from retrieval_index.errors import CacheError

BUSY_S = 5.0
"""Longest wait for another process's write."""

CREATE = """CREATE TABLE IF NOT EXISTS hits (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    query TEXT NOT NULL, top_k INTEGER NOT NULL, index_id TEXT NOT NULL, found BLOB NOT NULL, scores BLOB NOT NULL,
    UNIQUE (query, top_k, index_id))"""


class SearchKey(NamedTuple):
    """One distinct search. The index id keeps results of one index from answering for another."""

    query: str
    top_k: int
    index_id: str


RowsAndScores = tuple[np.ndarray, np.ndarray]
"""int64 [k] and float32 [k], as in one row of `retriever.Hits`."""


class DiskCache:
    """At most `max_entries` searches, the oldest out first. Any thread may use it, one at a time."""

    def __init__(self, file: str | Path, max_entries: int) -> None:
        """Open or make the file.

        Raises:
            CacheError: it cannot be written, or is no cache.
        """
        self._max_entries = max_entries
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(file, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")  # a power cut may lose the newest entries, no more
            self._database.execute(CREATE)
        except (OSError, sqlite3.Error) as error:
            raise CacheError(f"{file}: {error}", "disk_cache", "choose another file, or remove this one") from error

    def get(self, keys: Iterable[SearchKey]) -> dict[SearchKey, RowsAndScores]:
        """Those that are there. Raises sqlite3.Error."""
        found = {}
        for key in keys:
            row = self._database.execute(
                "SELECT found, scores FROM hits WHERE query = ? AND top_k = ? AND index_id = ?", key
            ).fetchone()
            if row is not None:
                found[key] = np.frombuffer(row[0], np.int64), np.frombuffer(row[1], np.float32)
        return found

    def put(self, entries: Mapping[SearchKey, RowsAndScores]) -> None:
        """All or none of them. Raises sqlite3.Error."""
        rows = [
            (*key, np.asarray(found, np.int64).tobytes(), np.asarray(scores, np.float32).tobytes())
            for key, (found, scores) in entries.items()
        ]
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(
                "INSERT OR REPLACE INTO hits (query, top_k, index_id, found, scores) VALUES (?, ?, ?, ?, ?)", rows
            )
            self._database.execute(
                "DELETE FROM hits WHERE number <= (SELECT max(number) FROM hits) - ?", (self._max_entries,)
            )

    def close(self) -> None:
        self._database.close()
