"""Memory of a whole run: the proportional set size (PSS) of a process tree, sampled in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil

GB = 1e9


def tree_pss_bytes(root: psutil.Process) -> int:
    """Sum of PSS over `root` and all its descendants. Shared pages count once in all; Linux only.

    A process that ends while it is read, or that may not be read, counts 0.
    """
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


class MemoryMonitor:
    """Largest tree PSS since it was started. `with MemoryMonitor() as monitor: …; monitor.peak_gb`.

    Args:
        read_gb: the present use; of this process and its descendants by default.
    """

    def __init__(self, every_s: float = 3.0, read_gb: Callable[[], float] | None = None):
        self._every_s = every_s
        self._read_gb = read_gb or (lambda: tree_pss_bytes(psutil.Process()) / GB)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-monitor", daemon=True)
        self._lock = threading.Lock()
        self._last_gb = self._recent_gb = 0.0
        self.peak_gb = 0.0

    def __enter__(self) -> MemoryMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def sample(self) -> None:
        """What the thread does every few seconds."""
        gb = self._read_gb()
        self.peak_gb = max(self.peak_gb, gb)
        with self._lock:
            self._last_gb, self._recent_gb = gb, max(self._recent_gb, gb)

    def take_gb(self) -> float:
        """Largest sample since the last call; the last one where there was none since. It reads nothing itself, since
        a reading takes tenths of a second and short stages come often."""
        with self._lock:
            taken, self._recent_gb = self._recent_gb or self._last_gb, 0.0
        return taken

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.sample()
            self._stop.wait(self._every_s)
