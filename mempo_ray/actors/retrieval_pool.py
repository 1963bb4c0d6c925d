"""`ports.Search` over the RetrievalActors of a run, and what they did in a step as metrics.

queries ──Router──▶ the query's home, or a less busy replica ──Outbox──▶ passages
on failure          died, failed or full: asked at another replica, each once; then ToolFailed | Overloaded
                    silent: DeadlineExceeded; the next try, which is the tool's, meets another replica
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from ray.actor import ActorHandle

from mempo_ray.actors.calls import answer
from mempo_ray.actors.outbox import Asked, Outbox, Outcome
from mempo_ray.contracts import Passage
from mempo_ray.errors import DeadlineExceeded, InfrastructureError, Overloaded, ToolFailed
from retrieval_index.routing import Router

STATS_S = 20.0

COUNTED = ("rejected", "failed", "timeouts", "overloaded", "disk_failures", "batches_failed")
"""Counters of a replica that are metrics by their own name."""

Counters = Mapping[str, float]
"""Of one replica since its start: `retrieval_index.service.ServiceStats`."""


class RetrievalPool:
    """Routes searches. Replicas may be announced again at any time; one that Ray restarts keeps its handle."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._actors: dict[str, ActorHandle] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._router = Router((ToolFailed, Overloaded), (DeadlineExceeded,))
        self._seen: dict[str, Counters] = {}

    def announce(self, replicas: Mapping[str, ActorHandle]) -> None:
        """These replicas serve, and no others. A name is one replica's for good: it is part of each query's home."""
        self._actors = dict(replicas)
        self._outboxes = {name: Outbox(partial(self._send, name, actor)) for name, actor in self._actors.items()}
        self._router.announce(self._actors)

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Raises ToolFailed, Overloaded or DeadlineExceeded."""
        if not queries:
            return []
        found = await self._router.ask(queries[0], len(queries), lambda name: self._outboxes[name](queries, top_k))
        if found is None:
            raise ToolFailed("no retrieval actor has been announced")
        return found

    async def _send(self, name: str, actor: ActorHandle, searches: list[Asked]) -> list[Outcome]:
        return await answer(actor.search_each.remote(searches), f"{name}: search", self._deadline_s, ToolFailed)

    @property
    def num_failures(self) -> int:
        """Of replicas, since the start; each was asked again elsewhere, or failed its caller."""
        return self._router.num_failures

    async def stats(self) -> dict[str, float]:
        """`retrieval/…` since the last call, over the replicas that answer."""
        calls = (answer(a.stats.remote(), f"{n}: stats", STATS_S, ToolFailed) for n, a in self._actors.items())
        found: dict[str, Counters] = {}
        for name, counters in zip(self._actors, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if not isinstance(counters, BaseException):
                found[name] = counters
            elif not isinstance(counters, InfrastructureError):
                raise counters
        metrics = retrieval_metrics(self._seen, found)
        self._seen |= found
        return metrics


def retrieval_metrics(before: Mapping[str, Counters], now: Mapping[str, Counters]) -> dict[str, float]:
    """The metrics of a step from the counters at its two ends.

    Denominators: `queries_per_s` of the time since the last reading; `hit_rate` (memory, in flight or disk) and
    `rejected` of all queries; `batch_size` of the batches; `encode_share` of the time that a replica was encoding or
    searching. Latencies are the slowest replica's, of its last 4,096 calls.

    Example:
        a replica at 100 queries after 10 s, and at 300 after 20 s: retrieval/queries_per_s = 20.
    """
    if not now:
        return {}

    def grown(name: str) -> float:
        return sum(counters[name] - _counted(before.get(replica), counters, name) for replica, counters in now.items())

    queries, batches = grown("queries"), grown("batches")
    seconds = max(c["seconds"] - _counted(before.get(r), c, "seconds") for r, c in now.items())
    busy_s = grown("encode_s") + grown("search_s")
    hits = grown("cache_hits") + grown("shared") + grown("disk_hits")
    metrics = {
        "queries": queries,
        "queries_per_s": queries / max(seconds, 1e-9),
        "hit_rate": hits / max(queries, 1),
        "batch_size": grown("batched_queries") / max(batches, 1),
        "queue_wait_s": grown("queue_wait_s") / max(grown("batched_queries"), 1),
        "encode_share": grown("encode_s") / max(busy_s, 1e-9),
        "busy_s": busy_s,
        "latency_p50_s": max(c["latency_p50_s"] for c in now.values()),
        "latency_p99_s": max(c["latency_p99_s"] for c in now.values()),
        "num_replicas": float(len(now)),
        **{name: grown(name) for name in COUNTED},
    }
    return {f"retrieval/{name}": value for name, value in metrics.items()}


def _counted(before: Counters | None, now: Counters, name: str) -> float:
    """What had been counted already; nothing where the replica has started anew since."""
    return before[name] if before is not None and before["seconds"] <= now["seconds"] else 0.0
