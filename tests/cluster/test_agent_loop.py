"""AgentLoopWorkers on real Ray, over scripted engines that die, hang or come late."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import ray

from mempo_ray.actors.agent_loop import AgentLoopWorker, EnginePool, RemoteAgentLoopWorker
from mempo_ray.agent.group import siblings
from mempo_ray.agent.protocol import write_turn
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.schema import Agent, AgentLimits, Rollout
from mempo_ray.contracts import EndReason, Passage, Task
from mempo_ray.errors import DeadlineExceeded, EngineFailed
from mempo_ray.ports import GenerateRequest, Generation
from tests.fakes.tokenizer import byte_level_folder

pytestmark = pytest.mark.slow

SEARCH = write_turn("nothing", "look", search="mentor Boko")
ANSWER = write_turn("mentor Boko Sari .", "done", answer="Sari")
FAST = Agent(limits=AgentLimits(search_retries=2), top_k=1)


@ray.remote(num_cpus=0, max_concurrency=64)
class ScriptedEngine:
    """Searches in turn 1, answers in turn 2. `failing_call`: that call (0-based) does not answer, see `failure`."""

    def __init__(self, folder, failing_call=None, failure="dies"):
        self._tokenizer = FileTokenizer.from_folder(folder)
        self._failing_call, self._failure, self._num_calls = failing_call, failure, 0
        self._asked, self._cancelled = asyncio.Event(), asyncio.Event()

    async def generate(self, request):
        call, self._num_calls = self._num_calls, self._num_calls + 1
        self._asked.set()
        if call == self._failing_call:
            if self._failure == "dies":
                ray.actor.exit_actor()
            if self._failure == "refuses":
                raise EngineFailed("draining")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self._cancelled.set()
                raise
        text = ANSWER if "<tool_response>" in self._tokenizer.decode(request.prompt_ids.tolist()) else SEARCH
        ids = [*self._tokenizer.encode(text), self._tokenizer.end_of_turn_id]
        return Generation(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), "stop", 5)

    async def num_calls(self):
        return self._num_calls

    async def asked(self):
        await self._asked.wait()

    async def cancelled(self):
        await self._cancelled.wait()


@ray.remote(num_cpus=0)
class ScriptedRetrieval:
    def search_each(self, searches):
        return [[[Passage("p1", "", "mentor Boko Sari .")][:top_k] for _ in queries] for queries, top_k in searches]


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(byte_level_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def retrieval():
    return ScriptedRetrieval.remote()


def requests(num_tasks=1, group_size=1):
    tasks = [Task(f"q{n}", "mentor Boko ?", (("Sari",),), "test") for n in range(num_tasks)]
    return [request for task in tasks for request in siblings(task, group_size, run_seed=0)]


def plain_worker(folder, agent=FAST, **rollout):
    return AgentLoopWorker(0, agent, Rollout(**rollout), folder)


async def collect(worker, asked):
    """[(payload, summary)] of a plain worker."""
    yielded = [item async for item in worker.run(asked)]
    return list(zip(yielded[::2], yielded[1::2], strict=True))


async def test_payloads_are_the_caller_s_and_survive_the_worker(folder, retrieval):
    worker = RemoteAgentLoopWorker.options(num_cpus=0).remote(0, FAST, Rollout(), folder)
    await worker.set_engines.remote({"a": ScriptedEngine.remote(folder)})
    await worker.set_retrieval.remote({"a": retrieval})
    refs = [ref async for ref in worker.run.options(num_returns="streaming").remote(requests(3, 2))]
    assert len(refs) == 12
    ray.kill(worker)
    for payload_ref, summary_ref in zip(refs[::2], refs[1::2], strict=True):
        payload, summary = await payload_ref, await summary_ref
        assert summary.end_reason is EndReason.ANSWERED
        assert summary.format_valid
        assert (len(payload), summary.num_turns) == (2, 2)
        assert replace(payload.trajectories()[0].summary(), num_bytes=payload.num_bytes) == summary


async def test_turns_are_spread_over_the_engines(folder, retrieval):
    engines = {name: ScriptedEngine.remote(folder) for name in "ab"}
    worker = plain_worker(folder)
    await worker.set_engines(engines)
    await worker.set_retrieval({"a": retrieval})
    await collect(worker, requests(num_tasks=12, group_size=4))
    calls = [await engine.num_calls.remote() for engine in engines.values()]
    assert sum(calls) == 96
    assert min(calls) > 0


@pytest.mark.parametrize("failure", ["dies", "refuses"])
async def test_a_turn_of_a_failed_engine_is_asked_again_elsewhere(folder, retrieval, failure):
    worker = plain_worker(folder)
    await worker.set_engines({"a": ScriptedEngine.remote(folder, 0, failure), "b": ScriptedEngine.remote(folder)})
    await worker.set_retrieval({"a": retrieval})
    ((_, summary),) = await collect(worker, requests())
    assert (summary.end_reason, summary.attempt) == (EndReason.ANSWERED, 0)
    stats = await worker.stats()
    assert stats["turns_asked_again"] == 1
    assert (stats["episodes"], stats["episodes_resampled"], stats["episodes_in_flight"]) == (1, 0, 0)
    assert (await worker.stats())["turns_asked_again"] == 0


async def test_with_no_engine_left_a_turn_waits_for_the_next_announcement(folder, retrieval):
    worker = plain_worker(folder)
    dying = ScriptedEngine.remote(folder, 1)
    await worker.set_engines({"a": dying})
    await worker.set_retrieval({"a": retrieval})
    running = asyncio.create_task(collect(worker, requests()))
    await dying.asked.remote()
    await worker.set_engines({"a": ScriptedEngine.remote(folder)})
    ((_, summary),) = await running
    assert (summary.end_reason, summary.attempt) == (EndReason.ANSWERED, 0)


async def test_an_episode_without_any_engine_is_tried_again_and_then_yielded_broken(folder):
    worker = plain_worker(folder, request_timeout_s=0.05)
    ((payload, summary),) = await collect(worker, requests())
    assert (summary.end_reason, summary.attempt, summary.num_turns, len(payload)) == (EndReason.ENGINE_FAILED, 1, 0, 0)
    assert "none has been announced" in summary.detail
    assert (await worker.stats())["episodes_excluded"] == 1


async def test_a_turn_past_its_deadline_is_cancelled_at_the_engine(folder):
    hanging = ScriptedEngine.remote(folder, 0, "hangs")
    await hanging.num_calls.remote()  # it is there: Ray would cancel a call that has not arrived without a word to it
    pool = EnginePool(grace_s=0.0)
    pool.announce({"a": hanging})
    turn = asyncio.create_task(pool(GenerateRequest(np.zeros(3, np.int32), 0, 8, "q", deadline_s=5.0)))
    await asyncio.wait_for(hanging.asked.remote(), 60)
    with pytest.raises(DeadlineExceeded):
        await turn
    await asyncio.wait_for(hanging.cancelled.remote(), 60)


async def test_a_search_meets_another_replica_when_one_is_dead(folder, retrieval):
    dead = ScriptedRetrieval.remote()
    ray.kill(dead)
    worker = plain_worker(folder)
    await worker.set_engines({"a": ScriptedEngine.remote(folder)})
    await worker.set_retrieval({"a": dead, "b": retrieval})
    ((_, summary),) = await collect(worker, requests())
    assert summary.end_reason is EndReason.ANSWERED


async def test_no_more_episodes_at_once_than_configured(folder, retrieval):
    worker = plain_worker(folder, FAST.model_copy(update={"episodes_per_worker": 1}))
    hanging, free = ScriptedEngine.remote(folder, 0, "hangs"), ScriptedEngine.remote(folder)
    await worker.set_engines({"a": hanging})
    running = asyncio.create_task(collect(worker, requests(num_tasks=3)))
    await hanging.asked.remote()
    assert (await worker.stats())["episodes_in_flight"] == 1
    assert await hanging.num_calls.remote() == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(hanging.cancelled.remote(), 60)
    await worker.set_engines({"a": free})
    await worker.set_retrieval({"a": retrieval})
    assert len(await collect(worker, requests(num_tasks=3))) == 3


def test_the_worker_s_process_imports_neither_torch_nor_vllm_nor_transformers():
    code = "import sys, mempo_ray.actors.agent_loop; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
