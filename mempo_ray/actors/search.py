"""How one process searches: `retrieval.backend` says whom it asks, `retrieval.mode` what becomes of the answers.

    mode     local                                  http
    live     SharedSearch(RetrievalPool)            SharedSearch(HttpSearch)
    record   SharedSearch(Recorder(RetrievalPool))  SharedSearch(Recorder(HttpSearch))
    replay   Replay, whatever the backend: neither index nor server is needed

Each agent worker has a `SearchClient`, and so has the driver (cold start, probes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ray.actor import ActorHandle

from mempo_ray.actors.retrieval_pool import RetrievalPool
from mempo_ray.actors.search_http import HttpSearch
from mempo_ray.actors.search_record import Recorder, Replay
from mempo_ray.actors.search_shared import SharedSearch
from mempo_ray.config.schema import Retrieval
from mempo_ray.contracts import Passage
from mempo_ray.ports import Search


def record_file(settings: Retrieval, run: Path) -> Path | None:
    """The file that is written or replayed; None where searches are live.

    Args:
        run: the run folder.
    """
    if settings.mode == "live":
        return None
    return (Path(settings.record) if settings.record else run / "searches.arrow").resolve()


class SearchClient:
    """`ports.Search` as the `retrieval` section wants it.

    Args:
        deadline_s: of one search.
        record: the file of recorded searches; read or written unless the mode is `live`.

    Raises:
        DataError: the record to replay is missing or damaged.
    """

    def __init__(self, settings: Retrieval, deadline_s: float, record: Path | None = None) -> None:
        self._pool = RetrievalPool(deadline_s)
        self._http = HttpSearch(settings.url, deadline_s) if settings.backend == "http" else None
        asked: Search = self._http or self._pool
        if settings.mode == "record":
            assert record is not None
            asked = Recorder(asked, record)
        self._shared = SharedSearch(asked)
        self._search: Search = self._shared
        if settings.mode == "replay":
            assert record is not None
            self._search = Replay(record)
        self._taken = self._totals()

    def announce(self, replicas: Mapping[str, ActorHandle]) -> None:
        """The replicas that serve now, by name; none where no index is needed."""
        self._pool.announce(replicas)

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Raises as the back-end does; see its file."""
        return await self._search(queries, top_k)

    def take_counts(self) -> dict[str, float]:
        """Since the last call: `searches` (queries), `searches_repeated` (of them, answered in this process) and
        `searches_failed` (at a replica or server; each was asked again, or failed its caller)."""
        now, before = self._totals(), self._taken
        self._taken = now
        return {name: float(now[name] - before[name]) for name in now}

    def _totals(self) -> dict[str, int]:
        return {
            "searches": self._shared.num_queries,
            "searches_repeated": self._shared.num_repeated,
            "searches_failed": (self._http or self._pool).num_failures,
        }

    async def check(self) -> None:
        """One search of the server, so that a wrong address ends the run before it begins. Raises as `HttpSearch`."""
        if self._http is not None and not isinstance(self._search, Replay):
            await self._http(["warm up"], 1)

    async def stats(self) -> dict[str, float]:
        """`retrieval/…` of the replicas since the last call; nothing where there are none."""
        return await self._pool.stats()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
