"""An encoder in a process of its own, so that FAISS on a GPU does not meet torch's CUDA runtime.

    find ──texts──▶ child: torch ──float32 [n, dim]──▶ FAISS, here
    on failure   a child that dies fails the call (EncoderError), and the next call starts another one;
                 a parent that dies takes its child with it

Both bring a CUDA runtime and CUDA streams of their own; in one process they have crashed each other.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from retrieval_index.encoder import Encoder
from retrieval_index.errors import EncoderError

ENCODE_S = 300.0
"""Longest time of one call, the start of the child and the loading of its model included."""


class EncoderProcess:
    """`encoder.Encoder`, whose vectors are made elsewhere. The child starts with the first call.

    Args:
        make: makes the encoder, here (only its name and fingerprint are read) and in the child; can be pickled.
    """

    def __init__(self, make: Callable[[], Encoder]) -> None:
        self._make, described = make, make()
        self.name, self.dim, self.fingerprint = described.name, described.dim, described.fingerprint
        self.settings: dict[str, Any] = described.settings
        self._pool: ProcessPoolExecutor | None = None

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """As the encoder's. Raises EncoderError."""
        return self._encode("encode_queries", texts)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """As the encoder's. Raises EncoderError."""
        return self._encode("encode_passages", texts)

    def close(self) -> None:
        """End the child; the next call would start another one."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _encode(self, method: str, texts: Sequence[str]) -> np.ndarray:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # a forked child would share CUDA and threads
            self._pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=(self._make,))
        try:
            return self._pool.submit(_encode, method, list(texts)).result(ENCODE_S)
        except (BrokenProcessPool, TimeoutError) as error:
            self.close()
            raise EncoderError(f"the encoder's process ended or hung: {error!r}", "encoder", "see its log") from error


# --- in the child --------------------------------------------------------------------------------------------

_encoder: Encoder | None = None


def _start(make: Callable[[], Encoder]) -> None:
    global _encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = make()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _encode(method: str, texts: list[str]) -> np.ndarray:
    return getattr(_encoder, method)(texts)
