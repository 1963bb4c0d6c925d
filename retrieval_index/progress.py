"""How far a build is, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLeft:
    """A `build.Progress` that writes one line now and then, and a last one at the end.

    The rate is that of this process: what an earlier one had done before it was killed is in its first call.

    Args:
        write: takes a line without a line end, and whether it is the last.
        every_s: shortest time between two lines.
    """

    def __init__(
        self,
        write: Callable[[str, bool], None],
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._every_s, self._clock = write, every_s, clock
        self._started_s = self._written_s = 0.0
        self._already: int | None = None

    def __call__(self, done: int, total: int) -> None:
        now_s = self._clock()
        if self._already is None:
            self._already, self._started_s, self._written_s = done, now_s, now_s
            return
        if done < total and now_s - self._written_s < self._every_s:
            return
        self._written_s = now_s
        rate = (done - self._already) / max(now_s - self._started_s, 1e-6)
        left_s = (total - done) / rate
        line = f"encoded {done:,} of {total:,} passages, {rate:,.0f} a second, {left_s:,.0f} s left"
        self._write(line, done == total)
