"""Search services as actors of a Ray cluster, behind one server: `serve --ray --replicas N`.

server ──search──▶ ReplicaPool ──Router──▶ Replica ×N, each a RetrievalService with its own encoder and index
on failure         a replica that dies, or whose queue is full: the call goes to another one, and Ray starts it again;
                   one that cannot load at the start ends the server
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, WorkerCrashedError

from retrieval_index.errors import (
    RetrievalIndexError,
    SearchFailed,
    SearchTimeout,
    ServeError,
    ServiceError,
    ServiceOverloaded,
)
from retrieval_index.routing import Router
from retrieval_index.service import Result, RetrievalService

START_S = 300.0
GRACE_S = 2.0
"""How much later than a replica's own deadline the pool gives up: the replica's message says more."""

DIED = (RayActorError, OutOfMemoryError, WorkerCrashedError)
"""What Ray raises when a replica's process is gone."""

OpenService = Callable[[], RetrievalService]
"""Run in the replica's process: `functools.partial(RetrievalService.open, folder, …)`."""


class Replica:
    """One service. It holds no state, so it may die and start again.

    It is opened by the first call, not by the constructor: a process that dies there is started again for ever, while
    the caller waits. A failure is a value, so that it crosses the border with its type.
    """

    def __init__(self, open_service: OpenService) -> None:
        self._open_service = open_service
        self._service: RetrievalService | None = None

    async def warm_up(self) -> RetrievalIndexError | None:
        try:
            await self._opened().warm_up()
        except RetrievalIndexError as error:
            return error
        return None

    async def search(self, queries: Sequence[str], top_k: int) -> list[Result] | ServiceError:
        try:
            return await self._opened().search(queries, top_k)
        except ServiceError as error:
            return error
        except RetrievalIndexError as error:
            return SearchFailed(f"a replica cannot open the index: {error}", "retrieval")

    async def counters(self) -> dict[str, float]:
        return await self._opened().counters()

    def _opened(self) -> RetrievalService:
        if self._service is None:
            self._service = self._open_service()
        return self._service


class ReplicaPool:
    """`server.Searches` over replicas, on the cluster that Ray is connected to (or a local one that it starts).

    Args:
        deadline_s: of one search, as in the replicas' own limits.
    """

    def __init__(self, open_service: OpenService, num_replicas: int, deadline_s: float, num_gpus: int = 0) -> None:
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        self._deadline_s = deadline_s
        remote = RemoteReplica.options(num_gpus=num_gpus)
        self.replicas: dict[str, Any] = {f"replica-{i}": remote.remote(open_service) for i in range(num_replicas)}
        self._router = Router((SearchFailed, ServiceOverloaded), (SearchTimeout,))
        self._router.announce(self.replicas)

    async def warm_up(self) -> None:
        """Raises ServeError where a replica dies or does not start, and else what its service raised."""
        try:
            async with asyncio.timeout(START_S):
                failures = await asyncio.gather(*(replica.warm_up.remote() for replica in self.replicas.values()))
        except TimeoutError:
            raise ServeError(
                f"{len(self.replicas)} replicas did not start within {START_S:g} s", "replicas", "ask for fewer"
            ) from None
        except DIED as error:
            raise ServeError(f"one died while it loaded: {_last_line(error)}", "replicas", "see its log") from error
        for failure in filter(None, failures):
            raise failure

    async def search(self, queries: Sequence[str], top_k: int) -> list[Result]:
        """Raises ServiceError, when every replica has failed or the deadline is over."""
        if not queries:
            return []
        found = await self._router.ask(queries[0], len(queries), lambda name: self._send(name, queries, top_k))
        assert found is not None  # there is at least one replica
        return found

    async def _send(self, name: str, queries: Sequence[str], top_k: int) -> list[Result]:
        try:
            async with asyncio.timeout(self._deadline_s + GRACE_S):
                found = await self.replicas[name].search.remote(list(queries), top_k)
        except TimeoutError:
            raise SearchTimeout(f"{name} did not answer within {self._deadline_s:g} s", "retrieval") from None
        except DIED as error:
            raise SearchFailed(f"{name}: {_last_line(error)}", "retrieval") from error
        if isinstance(found, ServiceError):
            raise found
        return found

    async def counters(self) -> dict[str, float]:
        """Sums over the replicas that answer; of latencies the largest."""
        calls = (replica.counters.remote() for replica in self.replicas.values())
        found = await asyncio.gather(*calls, return_exceptions=True)
        parts = [part for part in found if isinstance(part, dict)]
        names = parts[0] if parts else ()
        largest = ("seconds", "latency_p50_s", "latency_p99_s")
        sums = {name: (max if name in largest else sum)(part[name] for part in parts) for name in names}
        return {**sums, "replicas": float(len(parts))}

    async def close(self) -> None:
        for replica in self.replicas.values():
            ray.kill(replica)


def _last_line(error: Exception) -> str:
    """Ray's messages go on for pages, and end with the reason."""
    return str(error).strip().rpartition("\n")[2].strip()


RemoteReplica = ray.remote(num_cpus=1, max_concurrency=4096, max_restarts=-1)(  # pyrefly: ignore[unexpected-keyword]
    Replica
)
