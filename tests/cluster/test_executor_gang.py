"""BatchExecutor and GangRunner over real Ray actors: payloads by reference, and a rank that dies, hangs or refuses."""

from __future__ import annotations

import asyncio
import os
import threading

import numpy as np
import pytest
import ray
from ray.actor import ActorHandle

from mempo_ray.actors.batch_executor import BatchExecutorActor, GangRunner
from mempo_ray.actors.calls import answer
from mempo_ray.config.schema import BatchExecutor as Section
from mempo_ray.contracts import (
    Command,
    CommandReply,
    LoadCommand,
    LogProbRequest,
    LogProbResult,
    PayloadRef,
    PublishCommand,
    SaveCommand,
    ScoreCommand,
    Segment,
    TrainPlan,
)
from mempo_ray.errors import ConfigError, DataError, WorkerFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@ray.remote(num_cpus=0.1)
class StubRank:
    """A rank without a model: its log-prob is the sum of the payload. A command's URI says how to misbehave."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sequence = 0

    def run(self, sequence: int, command: Command, *payloads: np.ndarray) -> CommandReply:
        assert sequence == self._sequence
        self._sequence += 1
        value: object = {}
        if isinstance(command, ScoreCommand):
            value = [self._score(r, i, payloads) for r, i in zip(command.requests, command.payload_index, strict=True)]
        elif self._rank == 1 and isinstance(command, SaveCommand | LoadCommand | PublishCommand):
            self._misbehave(command.uri)
        return CommandReply(sequence, 5, value)

    def _score(self, request: LogProbRequest, index: int, payloads: tuple) -> LogProbResult | str:
        if request.id == "bad":
            return "no such row"
        return LogProbResult(request.id, 5, (np.float32(payloads[index].sum()).reshape(1),))

    def _misbehave(self, uri: str) -> None:
        if uri == "die":
            os._exit(1)
        if uri == "hang":
            threading.Event().wait()
        if uri == "refuse":
            raise ConfigError("checkpoint of another model")


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def ranks() -> list[ActorHandle]:
    return [StubRank.remote(i) for i in range(2)]


@pytest.fixture
def executor(ranks):
    section = Section(micro_batch_tokens=40)
    actor = BatchExecutorActor.options(num_cpus=0.1).remote(section, GangRunner(ranks, command_timeout_s=3.0))
    yield actor
    ray.kill(actor)


def request(name: str, payload: np.ndarray | None = None) -> LogProbRequest:
    ref = None if payload is None else PayloadRef(name, ray.put(payload))
    return LogProbRequest(name, (Segment(-1, tuple(range(10)), 10, (0, 1)),), ref)


async def test_payloads_reach_the_ranks_and_each_request_gets_its_own_answer(executor):
    calls = [executor.logprobs.remote(request(f"r{i}", np.full(4, i))) for i in range(20)]
    results = [await answer(call, "log-probs", 60) for call in calls]
    assert [(r.id, r.version, float(r.logprobs[0][0])) for r in results] == [(f"r{i}", 5, 4.0 * i) for i in range(20)]
    with pytest.raises(DataError, match="log-probs of bad: no such row"):
        await answer(executor.logprobs.remote(request("bad")), "log-probs", 60)


@pytest.mark.parametrize(
    ("uri", "error", "message"),
    [
        ("die", WorkerFailed, r"SaveCommand \d, rank 1: The actor died"),
        ("hang", WorkerFailed, r"SaveCommand \d, rank 1: no answer within 3 s"),
        ("refuse", ConfigError, "checkpoint of another model"),
    ],
)
async def test_a_lost_rank_ends_the_gang_and_nobody_waits(ranks, executor, uri, error, message):
    saving = executor.save.remote(uri, {})
    pending = [executor.logprobs.remote(request(f"r{i}", np.ones(1))) for i in range(3)]
    with pytest.raises(error, match=message):
        await answer(saving, "save", 60)
    outcomes = await asyncio.gather(*(answer(p, "log-probs", 10) for p in pending), return_exceptions=True)
    assert all(isinstance(o, WorkerFailed | LogProbResult) for o in outcomes)
    with pytest.raises(WorkerFailed, match="SaveCommand"):
        await answer(executor.train.remote(TrainPlan(0, 5, (), ())), "train", 10)
    for rank in ranks:
        with pytest.raises(WorkerFailed):
            await answer(rank.run.remote(0, ScoreCommand((), ())), "rank", 30)
