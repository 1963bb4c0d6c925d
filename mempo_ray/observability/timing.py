"""Seconds by stage, from one context manager, so that loops stay free of clocks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class StageTimer:
    """Accumulates wall seconds by stage name.

    Example:
        >>> ticks = iter([0.0, 2.0])
        >>> timer = StageTimer(clock=lambda: next(ticks))
        >>> with timer.stage("train"):
        ...     pass
        >>> timer.take()
        {'time/train_s': 2.0}
    """

    clock: Callable[[], float] = time.monotonic
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - start

    def take(self) -> dict[str, float]:
        """Metrics since the last call, as `time/<stage>_s`."""
        taken = {f"time/{name}_s": value for name, value in self.seconds.items()}
        self.seconds.clear()
        return taken
