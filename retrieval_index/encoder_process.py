"""An encoder in a process of its own, so that FAISS on a GPU does not meet torch's CUDA runtime.

    find ──texts──▶ child: torch ──float32 [n, dim]──▶ FAISS, here
    waits for      the child's start and its model, `START_S`; one call, `ENCODE_S`
    on failure     a child that dies, or is silent for so long, is ended and fails its call (EncoderDown); the next call
                   starts another one. If that fails as well, calls fail at once for `REST_S`; then one tries again.
                   A parent that dies takes its child with it

Both bring a CUDA runtime and CUDA streams of their own; in one process they have crashed each other.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from retrieval_index.encoder import Encoder
from retrieval_index.errors import EncoderDown

log = logging.getLogger(__name__)

START_S = 120.0
"""Longest start of a child: imports, the model from disk, and one query through it."""
ENCODE_S = 30.0
"""Longest time of one call; who searches waits no longer either (`ServiceLimits.deadline_s`)."""
REST_S = 60.0
"""How long calls fail at once after two children in a row have died or hung."""
END_S = 5.0
"""Longest wait for a child that was killed."""


class EncoderProcess:
    """`encoder.Encoder`, whose vectors are made elsewhere. The child starts with the first call. For one thread.

    Args:
        make: makes the encoder, here (only its name and fingerprint are read) and in the child; can be pickled.
        encode_s, rest_s, clock: what a test replaces.
    """

    def __init__(
        self,
        make: Callable[[], Encoder],
        *,
        encode_s: float = ENCODE_S,
        rest_s: float = REST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, described = make, make()
        self.name, self.dim, self.fingerprint = described.name, described.dim, described.fingerprint
        self.settings: dict[str, Any] = described.settings
        self._encode_s, self._rest_s, self._clock = encode_s, rest_s, clock
        self._child: tuple[SpawnProcess, Connection] | None = None
        self._failures_in_a_row = 0
        self._rests_until_s = -float("inf")

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """As the encoder's. Raises EncoderDown, and what the encoder raises."""
        return self._encode("encode_queries", texts)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """As the encoder's. Raises EncoderDown, and what the encoder raises."""
        return self._encode("encode_passages", texts)

    def close(self) -> None:
        """End the child, whatever it does; the next call would start another one."""
        if self._child is not None:
            process, pipe = self._child
            self._child = None
            process.kill()
            process.join(END_S)
            pipe.close()

    def _encode(self, method: str, texts: Sequence[str]) -> np.ndarray:
        if self._clock() < self._rests_until_s:
            raise EncoderDown(
                f"its process failed {self._failures_in_a_row} times in a row and is not tried for {self._rest_s:g} s",
                "encoder",
                "see its log",
            )
        try:
            if self._child is None:
                self._start()
            vectors = self._ask(self._encode_s, method, list(texts))
        except Exception as error:
            if self._child is None:  # else the encoder itself refused these texts
                self._failures_in_a_row += 1
                if self._failures_in_a_row > 1:
                    self._rests_until_s = self._clock() + self._rest_s
                log.warning("%s", error)
            raise
        self._failures_in_a_row = 0
        return vectors

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child would share CUDA and threads
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._make, theirs), name="encoder", daemon=True)
        process.start()
        theirs.close()  # so that reading from ours ends when the child does
        self._child = process, ours
        try:
            self._ask(START_S, "encode_queries", ["warm up"])
        except Exception:
            self.close()
            raise

    def _ask(self, longest_s: float, method: str, texts: list[str]) -> np.ndarray:
        """Raises EncoderDown, and what the encoder raised in the child."""
        assert self._child is not None
        process, pipe = self._child
        silent = threading.Event()

        def end() -> None:
            silent.set()
            process.kill()  # which ends the reading or writing below

        timer = threading.Timer(longest_s, end)
        timer.start()
        try:
            pipe.send((method, texts))
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            did = f"was silent for {longest_s:g} s" if silent.is_set() else "ended"
            raise EncoderDown(f"its process {did}", "encoder", "see its log") from error
        finally:
            timer.cancel()
        if isinstance(answer, Exception):
            raise answer
        return answer


# --- in the child --------------------------------------------------------------------------------------------


def _serve(make: Callable[[], Encoder], pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    encoder: Encoder | None = None
    while True:
        try:
            method, texts = pipe.recv()
        except EOFError:  # nobody holds the other end any more
            return
        try:
            encoder = encoder or make()
            answer = getattr(encoder, method)(texts)
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            answer = error
        pipe.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
