"""Memories scored by rollout engines, over fake engines: who is asked, when, and what happens when one dies."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from mempo_ray.actors.engine_logprobs import EngineLogProbs
from mempo_ray.actors.lease import Lease, SideBySide
from mempo_ray.actors.rollout import SCORES_AT_ONCE
from mempo_ray.contracts import LogProbRequest, PayloadRef, Segment
from mempo_ray.errors import ConfigError, DataError, DeadlineExceeded, EngineFailed, TrainingError
from mempo_ray.generation.fake_engine import FakeEngine
from tests.fakes.engines import fake_engine, handle_of
from tests.fakes.handle import replace_ray
from tests.fakes.training import forest, trajectory

pytestmark = pytest.mark.timeout(60)

VERSION = 3


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    replace_ray(monkeypatch)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def scorer(num_engines: int = 1, clock: Clock | None = None) -> tuple[EngineLogProbs, list[FakeEngine], list]:
    engines = [await fake_engine(index, VERSION) for index in range(num_engines)]
    handles = [handle_of(engine, f"rollout-{index}") for index, engine in enumerate(engines)]
    port = EngineLogProbs(num_engines, SideBySide(), clock or Clock())
    port.announce({f"rollout-{index}": handle for index, handle in enumerate(handles)})
    return port, engines, handles


def request(name: str = "memory/q/0/0", **fields: object) -> LogProbRequest:
    segments = (Segment(-1, (1, 2, 3), 3), Segment(0, (4, 5), 2, (0, 2)))
    return replace(LogProbRequest(name, segments, deadline_s=5, affinity="q"), **fields)


async def settle() -> None:
    """Everything that can run has run."""
    for _ in range(50):
        await asyncio.sleep(0)


async def paused(engine: FakeEngine, call) -> asyncio.Task:
    """The call, waiting in a paused engine."""
    await engine.pause()
    waiting = asyncio.create_task(call)
    await settle()
    return waiting


async def test_slices_are_read_from_the_payload_where_the_engine_is():
    port, *_ = await scorer()
    payload = trajectory(1)
    asked = replace(forest("memory/q/0/0", payload), payload=PayloadRef("q/0", payload), deadline_s=5)
    result = await port(asked)
    assert (result.id, result.version) == ("memory/q/0/0", VERSION)
    assert [len(values) for values in result.logprobs] == [len(payload.ragged["output_ids"][0]), 2]


async def test_a_request_that_cannot_be_computed_fails_as_the_data_it_is():
    port, *_ = await scorer()
    with pytest.raises(DataError, match="states 4"):
        await port(request(segments=(Segment(-1, (1, 2, 3), 4), Segment(0, (4,), 1, (0, 1)))))


async def test_a_request_of_a_dying_engine_is_asked_elsewhere_and_counted():
    port, (first, _), handles = await scorer(2)
    waiting = await paused(first, port(request()))
    handles[0]._death.set()
    assert (await waiting).version == VERSION
    assert port.stats()["scoring/num_engine_failures"] == 1
    assert port.stats()["scoring/num_engine_failures"] == 0


async def test_siblings_ask_the_engine_that_has_their_question_in_its_cache():
    port, engines, _ = await scorer(2)
    asked: list[str] = []
    for index, engine in enumerate(engines):
        engine.score = _noted(engine.score, asked, index)
    for sibling in range(3):
        await port(request(f"memory/q/{sibling}/0"))
    assert len(set(asked)) == 1


def _noted(score, asked: list, index: int):
    async def noted(*arguments):
        asked.append(index)
        return await score(*arguments)

    return noted


async def test_without_an_engine_a_request_fails_at_its_deadline():
    port = EngineLogProbs(1, SideBySide())
    with pytest.raises(EngineFailed, match=r"no engine served a log-probs memory/q/0/0 in 0\.05 s"):
        await port(request(deadline_s=0.05))


async def test_an_engine_that_is_too_slow_is_a_missed_deadline():
    port, (engine,), _ = await scorer()
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        await (await paused(engine, port(request(deadline_s=0.05))))


async def test_other_weights_than_the_requests_are_refused_as_the_executor_refuses_them():
    port, *_ = await scorer()
    assert (await port(request(policy_version=VERSION))).version == VERSION
    with pytest.raises(TrainingError, match="asked of version 2, rollout-0 holds 3"):
        await port(request(policy_version=2))


@pytest.mark.parametrize("fields", [{"model": "reference"}, {"temperature": 0.7}])
async def test_what_engines_cannot_know_is_refused(fields):
    port, *_ = await scorer()
    with pytest.raises(ConfigError):
        await port(request(**fields))


async def test_sets_are_refused_since_engines_score_in_any_order():
    port, *_ = await scorer()
    with pytest.raises(ConfigError, match=r"run\.deterministic"):
        await port.begin(2)


async def test_an_engine_is_sent_few_requests_at_once_so_that_turns_find_it_free():
    port, (engine,), (handle,) = await scorer()
    calls = [asyncio.create_task(port(request(f"{i}"))) for i in range(3 * SCORES_AT_ONCE)]
    await engine.pause()
    await settle()
    assert (await handle.status.remote()).num_in_flight == SCORES_AT_ONCE
    await engine.resume()
    assert len(await asyncio.gather(*calls)) == 3 * SCORES_AT_ONCE


async def test_a_caller_that_goes_away_frees_its_places():
    port, (engine,), (handle,) = await scorer()
    waiting = await paused(engine, port(request()))
    waiting.cancel()
    await settle()
    assert (await handle.status.remote()).num_in_flight == 0
    await engine.resume()
    calls = [port(request(f"{i}")) for i in range(SCORES_AT_ONCE)]
    assert len(await asyncio.gather(*calls)) == SCORES_AT_ONCE


async def test_busy_seconds_are_those_with_a_request_at_an_engine():
    clock = Clock()
    port, (engine,), _ = await scorer(clock=clock)
    first, second = [await paused(engine, port(request(name))) for name in "ab"]
    clock.now = 2.0
    await engine.resume()
    await asyncio.gather(first, second)
    clock.now = 9.0
    assert port.stats()["scoring/engine_busy_s"] == 2.0
    assert port.stats()["scoring/engine_busy_s"] == 0.0


async def test_on_shared_gpus_it_is_the_engines_turn():
    log: list[str] = []

    async def note(what: str) -> None:
        log.append(what)

    turns = Lease(lambda: note("pause"), lambda: note("resume"))
    async with turns.held_by("policy"):
        pass
    port = EngineLogProbs(1, turns)
    port.announce({"rollout-0": handle_of(await fake_engine(0, VERSION))})
    await port(request())
    assert log == ["pause", "resume"]


async def test_log_probs_differ_by_prefix_and_token():
    port, *_ = await scorer()
    one, other = [await port(request(segments=(Segment(-1, (i,), 1), Segment(0, (4, 5), 2, (0, 2))))) for i in (1, 2)]
    assert not np.array_equal(one.logprobs[0], other.logprobs[0])
