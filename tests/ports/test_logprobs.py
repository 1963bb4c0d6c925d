"""What every `ports.LogProbs` does: the fake, one real rank behind the real BatchExecutor, and rollout engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from mempo_ray.actors.batch_executor import BatchExecutor
from mempo_ray.actors.engine_logprobs import EngineLogProbs
from mempo_ray.actors.lease import SideBySide
from mempo_ray.config.schema import BatchExecutor as Section
from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import LogProbRequest, LogProbResult, PayloadRef, Segment
from mempo_ray.errors import DeadlineExceeded, InfrastructureError
from mempo_ray.generation.engine import Continuation, Engine, build_engine, unproven
from mempo_ray.ports import GenerateRequest, LogProbs
from tests.fakes.engines import fake_engine, handle_of
from tests.fakes.handle import replace_ray
from tests.fakes.logprobs import FakeLogProbs
from tests.fakes.solo_gang import SoloGang
from tests.fakes.tiny_model import END_OF_TURN_ID, save_tiny_model, save_tiny_tokenizer
from tests.fakes.training import forest, settings, trajectory

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

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


def policy(model: Path, solo_gang, section: Section | None = None) -> tuple[LogProbs, BatchExecutor]:
    from mempo_ray.training.rank import PolicyRank

    section = section or Section(max_wait_s=0.001)
    executor = BatchExecutor(section, SoloGang(PolicyRank(settings(model), solo_gang)))
    return ExecutorLogProbs(executor), executor


@pytest_asyncio.fixture(loop_scope="module", params=["fake", "policy"])
async def make(request, tiny_model, solo_gang):
    """Makes the port; `is_full`: it cannot take all requests at once."""
    if request.param == "fake":
        probabilities = {(task_id, 0): (0.5 / n, 0.25 / n) for n, task_id in enumerate(TASKS, start=1)}
        yield lambda is_full=False: FakeLogProbs(probabilities, refusals=int(is_full))
        return
    executors: list[BatchExecutor] = []

    def real(is_full: bool = False) -> LogProbs:
        section = Section(max_wait_s=0.001, max_queued_tokens=1 if is_full else 10_000)
        port, executor = policy(tiny_model, solo_gang, section)
        executors.append(executor)
        return port

    yield real
    for executor in executors:
        await executor.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that vLLM takes (heads of 64)."""
    folder = tmp_path_factory.mktemp("engine")
    save_tiny_model(folder, seed=0)
    save_tiny_tokenizer(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """One for the file, at temperature 1: only then can it score."""
    rollout = Rollout(dtype="float32", max_model_len=512, max_num_seqs=32, kv_cache_gb=0.1)
    log_file = tmp_path_factory.mktemp("log") / "e.log"
    engine = build_engine("e", str(engine_model), rollout, WeightSync(), END_OF_TURN_ID, log_file, scores=True)
    await engine.start()
    await engine.update(unproven(str(engine_model)))
    yield engine
    await engine.close()


def by_engine(engine: Engine) -> LogProbs:
    port = EngineLogProbs(1, SideBySide())
    port.announce({"rollout-0": handle_of(engine)})
    return port


@pytest_asyncio.fixture(loop_scope="module", params=["fake", "policy", "fake engine", "vllm"])
async def logprobs(request, monkeypatch, tiny_model, solo_gang, vllm) -> AsyncIterator[LogProbs]:
    """What all of them do; only the policy has a bounded queue, and sets."""
    replace_ray(monkeypatch)
    match request.param:
        case "fake":
            yield FakeLogProbs({(task_id, 0): (0.5 / n, 0.25 / n) for n, task_id in enumerate(TASKS, start=1)})
        case "policy":
            port, executor = policy(tiny_model, solo_gang)
            yield port
            await executor.close()
        case "fake engine":
            yield by_engine(await fake_engine(0, version=0))
        case "vllm":
            yield by_engine(vllm)


async def test_one_float32_array_for_each_marked_segment_as_long_as_its_targets(logprobs: LogProbs):
    result = await logprobs(request("a"))
    assert result.id == "memory/a/0/0"
    assert [(len(values), values.dtype) for values in result.logprobs] == [(2, np.float32), (1, np.float32)]
    assert all((values <= 0).all() and np.isfinite(values).all() for values in result.logprobs)


async def test_requests_side_by_side_do_not_mix(logprobs: LogProbs):
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


async def test_engines_and_policy_agree_on_equal_weights_also_beside_turns(monkeypatch, vllm, engine_model, solo_gang):
    replace_ray(monkeypatch)
    payloads = [trajectory(10 * i, num_turns=2) for i in range(4)]
    asked = [
        replace(forest(f"memory/{i}/0/0", payload), payload=PayloadRef(f"{i}/0", payload), affinity=f"{i}")
        for i, payload in enumerate(payloads)
    ]
    turns = [asyncio.create_task(vllm.generate(turn(seed))) for seed in range(4)]
    engines = await asyncio.gather(*(by_engine(vllm)(request) for request in asked))
    await asyncio.gather(*turns)
    port, executor = policy(engine_model, solo_gang)
    ranks = await asyncio.gather(*(port(request) for request in asked))
    await executor.close()
    for ours, theirs in zip(engines, ranks, strict=True):
        np.testing.assert_allclose(np.concatenate(ours.logprobs), np.concatenate(theirs.logprobs), atol=1e-4, rtol=0)


def turn(seed: int) -> GenerateRequest:
    return GenerateRequest(np.arange(2, 42, dtype=np.int32), seed, max_tokens=64, group="g")


async def test_what_an_engine_has_sampled_it_scores_alike_so_forcing_touches_no_turn(vllm):
    sampled = await asyncio.gather(*(vllm.generate(turn(seed)) for seed in range(4)))
    asked = [Continuation(turn(0).prompt_ids, each.output_ids) for each in sampled]
    _, scored = await vllm.score(asked, "g", 30)
    for each, logprobs in zip(sampled, scored, strict=True):
        np.testing.assert_allclose(each.logprobs, logprobs, atol=1e-5, rtol=0)


async def test_a_score_that_misses_its_deadline_leaves_the_engine(vllm):
    rng = np.random.default_rng(0)
    asked = [Continuation(rng.integers(2, 99, 200), rng.integers(2, 99, 200)) for _ in range(16)]
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        await vllm.score(asked, "g", 0.05)
    assert vllm.stats()["num_in_flight"] == 0
