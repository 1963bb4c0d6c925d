"""The driver's ports over fake handles: what waits, what is refused, what is given up."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mempo_ray.actors.adapters import RayPolicy, RayRewards, TokenRoom
from mempo_ray.actors.fleet import weights_dir
from mempo_ray.actors.lease import SideBySide
from mempo_ray.actors.reward import calls_at_once
from mempo_ray.config.load import load_file
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import LogProbRequest, PayloadRef, Scored, Segment, Unscored, WeightManifest, WeightProof
from mempo_ray.errors import PayloadLost
from mempo_ray.observability.run_folder import RunFolder
from tests.fakes.handle import FakeHandle, replace_ray

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    replace_ray(monkeypatch)


async def settle() -> None:
    """Everything that can run has run."""
    for _ in range(50):
        await asyncio.sleep(0)


class Executor:
    """Exports an empty folder; holds log-prob requests until told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.may_answer = asyncio.Semaphore(0)

    async def publish(self, uri: str) -> WeightManifest:
        Path(uri).mkdir()
        return WeightManifest(len(self.asked), uri, WeightProof((), ()))

    async def begin(self, num_requests: int) -> None:
        pass

    async def logprobs(self, request: LogProbRequest) -> str:
        self.asked.append(request.id)
        try:
            await self.may_answer.acquire()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        return request.id


def policy(executor: Executor, weights: Path, *words: str) -> RayPolicy:
    return RayPolicy(SimpleNamespace(node="n1"), FakeHandle(executor), load_file(None, words), weights, SideBySide())


def requests(number: int, tokens: int = 10) -> list[LogProbRequest]:
    return [LogProbRequest(f"{i}", (Segment(-1, tuple(range(tokens)), tokens, (0, 1)),)) for i in range(number)]


# -- policy -------------------------------------------------------------------------------------------------


async def test_the_snapshot_before_the_newest_stays_for_an_engine_that_may_still_pull_it(tmp_path):
    (tmp_path / "000999").mkdir()  # of a process that was killed
    port = policy(Executor(), tmp_path)
    for _ in range(4):
        await port.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000003"]


async def test_requests_wait_for_room_in_the_queue_instead_of_being_refused(tmp_path):
    executor = Executor()
    port = policy(executor, tmp_path, "batch_executor.max_queued_tokens=20")
    calls = [asyncio.create_task(port(request)) for request in requests(3)]
    await settle()
    assert executor.asked == ["0", "1"]
    executor.may_answer.release()
    await settle()
    assert executor.asked == ["0", "1", "2"]
    for _ in range(2):
        executor.may_answer.release()
    assert await asyncio.gather(*calls) == ["0", "1", "2"]


async def test_log_probs_that_nobody_waits_for_are_cancelled_and_their_room_is_free_again(tmp_path):
    executor = Executor()
    port = policy(executor, tmp_path, "batch_executor.max_queued_tokens=10")
    unwanted, wanted = (asyncio.create_task(port(request)) for request in requests(2))
    await settle()
    unwanted.cancel()
    await settle()
    assert (executor.asked, executor.cancelled) == (["0", "1"], ["0"])
    executor.may_answer.release()
    assert await wanted == "1"


async def test_a_set_is_admitted_whole_since_its_members_wait_for_each_other(tmp_path):
    executor = Executor()
    port = policy(executor, tmp_path, "batch_executor.max_queued_tokens=20")
    await port.begin(3)
    calls = [asyncio.create_task(port(request)) for request in requests(3)]
    await settle()
    assert executor.asked == ["0", "1", "2"]
    for _ in range(3):
        executor.may_answer.release()
    await asyncio.gather(*calls)


async def test_what_is_larger_than_the_room_has_it_to_itself():
    room = TokenRoom(10)
    async with room.held(30):
        waiting = asyncio.create_task(room.held(1).__aenter__())
        await settle()
        assert not waiting.done()
    await waiting


# -- rewards ------------------------------------------------------------------------------------------------


class Scorer:
    """Scores 1.0 when told; counts how many it has at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.most, self.running, self.cancelled = error, 0, 0, 0
        self.may_answer = asyncio.Event()

    async def score(self, payload: object) -> Scored:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.error is not None:
                raise self.error
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return Scored(1.0)


@pytest.mark.parametrize("settings", [Reward(), Reward(manager="batch"), Reward(manager="prime", processes=5)])
async def test_a_worker_is_sent_no_more_than_it_scores_soon(settings):
    scorer, most = Scorer(), calls_at_once(settings)
    rewards = RayRewards([FakeHandle(scorer)], settings)
    calls = [asyncio.create_task(rewards.score(PayloadRef(f"{i}", None))) for i in range(3 * most)]
    await settle()
    assert scorer.running == most
    scorer.may_answer.set()
    assert await asyncio.gather(*calls) == [Scored(1.0)] * len(calls)
    assert scorer.most == most


async def test_a_score_that_nobody_waits_for_is_cancelled():
    scorer = Scorer()
    call = asyncio.create_task(RayRewards([FakeHandle(scorer)], Reward()).score(PayloadRef("q/0", None)))
    await settle()
    call.cancel()
    await settle()
    assert (scorer.running, scorer.cancelled) == (0, 1)


async def test_a_lost_payload_is_unscored_not_the_end_of_the_run():
    scorer = Scorer(PayloadLost("its node is gone"))
    score = await RayRewards([FakeHandle(scorer)], Reward()).score(PayloadRef("q/0", None))
    assert score == Unscored("its node is gone", kind="infrastructure")
    assert scorer.most == 1


# -- where weights are published ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one_node", "free_bytes", "in_memory"), [(True, 1 << 40, True), (True, 1 << 10, False), (False, 1 << 40, False)]
)
def test_snapshots_lie_in_memory_where_three_fit_and_nobody_reads_them_from_another_node(
    tmp_path, monkeypatch, one_node, free_bytes, in_memory
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))
    folder, memory = RunFolder.create(tmp_path / "runs", "r"), tmp_path / "memory"
    memory.mkdir()
    root = weights_dir(load_file(None, []), folder, one_node, memory)
    assert root.is_dir()
    assert root.is_relative_to(memory if in_memory else folder.root)
