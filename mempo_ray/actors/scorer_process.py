"""A scorer process that is a Ray actor: Ray places it, on any node that has room (`reward.manager: remote`)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from mempo_ray.actors.calls import first_line
from mempo_ray.errors import CallFailed
from mempo_ray.rewards.isolation import START_S, ProcessEnded, Setup, no_answer, reply_of, run_call


class ScorerHost:
    """Calls functions, one at a time."""

    def prepare(self, setup: Setup) -> tuple[int, bytes]:
        """Its process number, and the reply of the initializer."""
        return os.getpid(), reply_of(setup.initializer, *setup.initargs)

    def run(self, payload: bytes) -> bytes:
        return reply_of(run_call, payload)


class RayScorerProcess:
    """`isolation.ScorerProcess` over a `ScorerHost` actor. It asks for no CPU: the plan counts the reward workers."""

    def __init__(self) -> None:
        self._host: Any = ScorerActor.remote()
        self.pid = 0  # until it has started

    def prepare(self, setup: Setup) -> None:
        try:
            self.pid, reply = ray.get(self._host.prepare.remote(setup), timeout=START_S)
        except RayError as error:
            raise CallFailed(f"a scorer process did not start: {first_line(error)}", "infrastructure") from None
        ready, text = pickle.loads(reply)
        if not ready:
            raise CallFailed(f"a scorer process did not start: {text}", "infrastructure")

    def run(self, payloads: Sequence[bytes], timeout_s: float) -> Iterator[bytes]:
        for payload in payloads:
            try:
                yield ray.get(self._host.run.remote(payload), timeout=timeout_s)
            except GetTimeoutError:
                raise no_answer(timeout_s) from None
            except RayError as error:
                raise ProcessEnded(f"the scorer's process ended: {first_line(error)}") from None

    def kill(self) -> None:
        ray.kill(self._host)

    def wait(self) -> None:
        """Ray reaps it."""


ScorerActor = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(ScorerHost)  # pyrefly: ignore[unexpected-keyword]
