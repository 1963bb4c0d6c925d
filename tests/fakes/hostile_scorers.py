"""Scorers as users write them on a bad day. Importable by name, so that a process of its own can run them."""

from __future__ import annotations

import ctypes
import os
import re
import time

from mempo_ray.config.schema import Reward
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.registry import register_scorer


def raises() -> object:
    raise ZeroDivisionError("no such reference")


def loops() -> object:
    while True:
        pass


def backtracks() -> object:
    return re.match(r"(a+)+$", "a" * 64 + "b")


def exits() -> object:
    os._exit(0)


def segfaults() -> object:
    return ctypes.string_at(0)


def sleeps() -> object:
    time.sleep(3600)
    return 1.0


def is_nan() -> object:
    return float("nan")


def is_no_number() -> object:
    return object()


def floods() -> object:
    return {"score": 1.0, "text": "x" * 2**30}


KINDS = {
    "raises": (raises, "scorer_error"),
    "loops": (loops, "timeout"),
    "backtracks": (backtracks, "timeout"),
    "exits": (exits, "scorer_error"),
    "segfaults": (segfaults, "scorer_error"),
    "sleeps": (sleeps, "timeout"),
    "is_nan": (is_nan, "scorer_error"),
    "is_no_number": (is_no_number, "scorer_error"),
    "floods": (floods, "scorer_error"),
}
"""Answer of the response → what its scorer does, and the kind of the `Unscored` that must come of it."""


def burn(cpu_s: float) -> None:
    """Use this much CPU time of the calling thread."""
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


@register_scorer("test-org/trusted")  # in a thread
@register_scorer("test-org/hostile", isolation="process")
def hostile(response: Response, settings: Reward) -> object:
    """Hostile where the answer is one of KINDS; else the answer as a number, after `extra_info['cpu_s']` of CPU."""
    if response.answer in KINDS:
        return KINDS[response.answer][0]()
    if response.answer == "tells_pid":
        return {"score": 1.0, "pid": os.getpid()}
    burn(response.extra_info.get("cpu_s", 0.0))
    return float(response.answer or 0)
