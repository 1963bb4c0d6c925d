"""Numbers to Ray's metrics, where its dashboard and any Prometheus scrape find them as `ray_mempo_<name>`.

    RaySink      the driver's numbers of a step       role "driver", replica "0"
    ActorGauges  an actor's own, every few seconds    its role and replica

Every metric has the tags run, role and replica. The run is the actors' Ray namespace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import ray
from ray.util.metrics import Counter, Gauge

from mempo_ray.observability.catalogue import Role, exported, find

log = logging.getLogger(__name__)

TAGS = ("run", "role", "replica")

PUSH_S = 5.0
"""Between two readings of an actor's numbers."""


class _Recorder:
    """One Ray metric a name, made at its first value and described by the catalogue."""

    def __init__(self, run: str, role: Role, replica: str) -> None:
        self._tags = {"run": run, "role": role, "replica": replica}
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._counted: dict[str, float] = {}

    def push(self, values: Mapping[str, float]) -> None:
        """Of a counter, the total since the start, or since `taken`."""
        for name, value in values.items():
            known = find(name)
            if known is not None and known.kind == "counter":
                self._count(name, known.meaning, float(value))
                continue
            if name not in self._gauges:
                self._gauges[name] = Gauge(exported(name), in_ascii(known.meaning if known else name), TAGS)
            self._gauges[name].set(float(value), tags=self._tags)

    def _count(self, name: str, meaning: str, total: float) -> None:
        if name not in self._counters:
            self._counters[name] = Counter(exported(name), in_ascii(meaning), TAGS)
            self._counters[name]._record(0.0, self._tags)  # `inc` refuses 0, and what never happened would be missing
        if (grown := total - self._counted.get(name, 0.0)) > 0:
            self._counters[name].inc(grown, tags=self._tags)
            self._counted[name] = total

    def taken(self) -> None:
        """Whoever counts begins at 0 again."""
        self._counted.clear()


def in_ascii(text: str) -> str:
    """Ray's descriptions may hold nothing else."""
    return text.replace("\N{MINUS SIGN}", "-").encode("ascii", "replace").decode()


class RaySink:
    """A MetricSink. Lives in the driver's process."""

    def __init__(self, run: str) -> None:
        self._recorder = _Recorder(run, "driver", "0")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._recorder.push({"step": step, **values})


class ActorGauges:
    """An actor's live numbers, by their names in the catalogue. Outside an actor it does nothing.

    The replica is what the actor's name ends in: `<run>/retrieval-3` → 3.

    Example, in the constructor of an async actor:
        ActorGauges("reward").keep(lambda: {"scorer/num_in_flight": self._num_in_flight})
    """

    def __init__(self, role: Role) -> None:
        self._recorder: _Recorder | None = None
        self._task: asyncio.Task | None = None
        context = ray.get_runtime_context() if ray.is_initialized() else None
        if context is not None and (name := context.get_actor_name()) is not None:
            self._recorder = _Recorder(context.namespace, role, replica=name.rpartition("-")[2])

    def push(self, values: Mapping[str, float]) -> None:
        """These values now. Of a counter, the total since the start, or since the last `taken`."""
        if self._recorder is not None:
            self._recorder.push(values)

    def taken(self, values: Mapping[str, float]) -> None:
        """A last push, before the actor sets its counts back to 0."""
        if self._recorder is not None:
            self._recorder.push(values)
            self._recorder.taken()

    def keep(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Push what `read` returns every PUSH_S seconds, for the actor's life. Call it on the actor's event loop."""
        if self._recorder is not None:
            self._task = asyncio.get_running_loop().create_task(self._keep(read), name="metrics")
            self._task.add_done_callback(_say_end)

    async def _keep(self, read: Callable[[], Mapping[str, float]]) -> None:
        while True:
            self.push(read())
            await asyncio.sleep(PUSH_S)


def _say_end(task: asyncio.Task) -> None:
    """Numbers that stop are a bug, but no reason to end a run."""
    if not task.cancelled():
        log.error("the actor's metrics have stopped", exc_info=task.exception())
