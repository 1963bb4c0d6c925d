"""A pool and a gang on the same GPUs, as the driver uses them: who is asked what, and in which order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from mempo_ray.actors.adapters import RayPolicy
from mempo_ray.actors.rollout_pool import RayRollouts
from mempo_ray.config.load import load_file
from mempo_ray.contracts import PushCommand, WeightManifest, WeightProof
from mempo_ray.ports import EngineStatus

ANSWERS = {
    "start": EngineStatus("engine", "stale", -1),
    "publish": WeightManifest(1, "/weights/1", WeightProof((1, 2), (-1.0,))),
    "push": {},
    "update": 0.0,
}
SILENT = ("set_retrieval", "set_engines", "watch")


class Actor:
    """A handle that answers every call at once and writes it down; `watch` never returns."""

    def __init__(self, name: str, log: list[tuple]) -> None:
        self._name, self._log = name, log

    def __getattr__(self, verb: str) -> Call:
        if verb.startswith("__"):
            raise AttributeError(verb)
        return Call(self._name, verb, self._log)


class Call:
    def __init__(self, name: str, verb: str, log: list[tuple]) -> None:
        self._name, self._verb, self._log = name, verb, log

    async def remote(self, *arguments: object, **named: object) -> object:
        if self._verb not in SILENT:
            self._log.append((self._name, self._verb, *arguments, *named.values()))
        if self._verb == "watch":
            await asyncio.get_running_loop().create_future()
        return ANSWERS.get(self._verb)


@pytest.fixture
def log() -> list[tuple]:
    return []


async def run_a_sync(log: list[tuple], weights: Path, *words: str) -> RayRollouts:
    config = load_file(None, ["policy.device=cuda", *words])
    rollouts = RayRollouts(config, lambda index: Actor("engine", log), [Actor("worker", log)])
    policy = RayPolicy(SimpleNamespace(node=""), Actor("gang", log), config, weights, rollouts.turns)
    rollouts.push = policy.push
    rollouts.start()
    await rollouts.sync(await policy.publish())
    await policy.stats()
    return rollouts


async def test_engines_sleep_while_the_gang_works_and_are_awake_when_it_pushes(log, tmp_path):
    rollouts = await run_a_sync(log, tmp_path, "placement.layout=colocated")
    assert [(name, verb) for name, verb, *_ in log] == [
        ("engine", "start"),
        ("engine", "pause"),
        ("gang", "publish"),
        ("engine", "resume"),
        ("gang", "push"),
        ("engine", "update"),
        ("gang", "stats"),
    ]
    assert log[1][2:] == (True,)  # gives its memory back
    assert log[5][2].uri == ""  # nothing is left to pull
    assert [engine.state for engine in rollouts.engines()] == ["serving"]


async def test_apart_they_do_not_wait_for_each_other(log, tmp_path):
    await run_a_sync(log, tmp_path, "placement.layout=disaggregated")
    assert {verb for _, verb, *_ in log} == {"start", "publish", "push", "update", "stats"}
    (push,) = (arguments[0] for _, verb, *arguments in log if verb == "push")
    assert isinstance(push, PushCommand)
    assert (push.transport, list(push.engines), push.gpus_per_engine) == ("nccl", ["rollout-0/0"], 1)
