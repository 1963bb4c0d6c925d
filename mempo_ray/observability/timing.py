"""Seconds and peak memory by stage, from one context manager, so that loops stay free of clocks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class StageTimer:
    """Accumulates wall seconds by stage name, and the largest memory in use. Stages may nest.

    Args:
        take_gb: the largest memory in use since its last call (`MemoryMonitor.take_gb`); None = not measured.

    Example:
        >>> ticks = iter([0.0, 2.0])
        >>> timer = StageTimer(clock=lambda: next(ticks))
        >>> with timer.stage("train"):
        ...     pass
        >>> timer.take()
        {'time/train_s': 2.0}
    """

    clock: Callable[[], float] = time.monotonic
    take_gb: Callable[[], float] | None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    gigabytes: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        start = self.clock()
        self._note_memory()  # what came before belongs to the stages around this one
        self._open.append(name)
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - start
            self._note_memory()
            self._open.remove(name)

    def _note_memory(self) -> None:
        gb = self.take_gb() if self.take_gb is not None else 0.0
        for name in self._open:
            self.gigabytes[name] = max(self.gigabytes.get(name, 0.0), gb)

    def take(self) -> dict[str, float]:
        """Metrics since the last call, as `time/<stage>_s` and, where measured, `ram/<stage>_gb`."""
        taken = {f"time/{name}_s": value for name, value in self.seconds.items()}
        if self.take_gb is not None:
            taken |= {f"ram/{name}_gb": value for name, value in self.gigabytes.items()}
        self.seconds.clear()
        self.gigabytes.clear()
        return taken
