"""Memory of a whole run: the proportional set size (PSS) of a process tree, sampled in a thread."""

from __future__ import annotations

import threading

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
    """Largest tree PSS since it was started. `with MemoryMonitor() as monitor: …; monitor.peak_gb`."""

    def __init__(self, every_s: float = 3.0):
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-monitor", daemon=True)
        self.peak_gb = 0.0

    def __enter__(self) -> MemoryMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        root = psutil.Process()
        while not self._stop.is_set():
            self.peak_gb = max(self.peak_gb, tree_pss_bytes(root) / GB)
            self._stop.wait(self._every_s)
