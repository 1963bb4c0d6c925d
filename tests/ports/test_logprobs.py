"""What every `ports.LogProbs` does: the fake, and one real rank behind the real BatchExecutor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from mempo_ray.actors.batch_executor import BatchExecutor
from mempo_ray.config.schema import BatchExecutor as Section
from mempo_ray.contracts import LogProbRequest, LogProbResult, Segment
from mempo_ray.errors import InfrastructureError
from mempo_ray.ports import LogProbs
from tests.fakes.logprobs import FakeLogProbs
from tests.fakes.solo_gang import SoloGang
from tests.fakes.training import settings

pytestmark = pytest.mark.timeout(60)

TASKS = ("a", "b", "c")
Make = Callable[..., LogProbs]


def request(task_id: str) -> LogProbRequest:
    """A prompt with two continuations, of which two tokens and one are marked; other ids for another task."""
    first = ord(task_id)
    segments = (
        Segment(-1, (first, 2, 3), 3),
        Segment(0, (4, 5), 2, (0, 2)),
        Segment(0, (6, 7, 8), 3, (1, 2)),
    )
    return LogProbRequest(f"memory/{task_id}/0/0", segments)


class ExecutorLogProbs:
    """The executor's methods under the port's names, as `actors.adapters.RayPolicy` has them over Ray."""

    def __init__(self, executor: BatchExecutor) -> None:
        self._executor = executor

    async def __call__(self, request: LogProbRequest) -> LogProbResult:
        return await self._executor.logprobs(request)

    async def begin(self, num_requests: int) -> None:
        await self._executor.begin(num_requests)


@pytest.fixture(params=["fake", "real"])
async def make(request, tiny_model, solo_gang):
    """Makes the port; `is_full`: it cannot take all requests at once."""
    if request.param == "fake":
        probabilities = {(task_id, 0): (0.5 / n, 0.25 / n) for n, task_id in enumerate(TASKS, start=1)}
        yield lambda is_full=False: FakeLogProbs(probabilities, refusals=int(is_full))
        return
    from mempo_ray.training.rank import PolicyRank

    executors: list[BatchExecutor] = []

    def real(is_full: bool = False) -> LogProbs:
        section = Section(max_wait_s=0.001, max_queued_tokens=1 if is_full else 10_000)
        executors.append(BatchExecutor(section, SoloGang(PolicyRank(settings(tiny_model), solo_gang))))
        return ExecutorLogProbs(executors[-1])

    yield real
    for executor in executors:
        await executor.close()


async def test_one_float32_array_for_each_marked_segment_as_long_as_its_targets(make: Make):
    result = await make()(request("a"))
    assert result.id == "memory/a/0/0"
    assert [(len(values), values.dtype) for values in result.logprobs] == [(2, np.float32), (1, np.float32)]
    assert all((values <= 0).all() and np.isfinite(values).all() for values in result.logprobs)


async def test_requests_side_by_side_do_not_mix(make: Make):
    logprobs = make()
    alone = [await logprobs(request(task_id)) for task_id in TASKS]
    together = await asyncio.gather(*(logprobs(request(task_id)) for task_id in TASKS))
    for one, other in zip(alone, together, strict=True):
        assert (one.id, one.version) == (other.id, other.version)
        assert np.concatenate(one.logprobs) == pytest.approx(np.concatenate(other.logprobs), abs=1e-5)
    assert len({float(result.logprobs[0][0]) for result in alone}) == len(TASKS)


async def test_a_refusal_is_a_typed_infrastructure_error_of_that_request_alone(make: Make):
    logprobs = make(is_full=True)
    answers = await asyncio.gather(*(logprobs(request(task_id)) for task_id in TASKS), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert 0 < len(refused) < len(TASKS)
    assert all(isinstance(refusal, InfrastructureError) for refusal in refused)


async def test_a_set_that_was_announced_is_answered_only_when_it_is_complete(make: Make):
    logprobs = make()
    await logprobs.begin(2)
    first = asyncio.create_task(logprobs(request("b")))
    assert not (await asyncio.wait([first], timeout=0.05))[0]
    results = await asyncio.gather(first, logprobs(request("a")))
    assert [result.id for result in results] == ["memory/b/0/0", "memory/a/0/0"]
