"""What the keeper of a pool asks of it, look by look, with the clock and the notices in the test's hands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from mempo_ray.actors.pool_keeper import PoolKeeper, retrieval_size, rollout_size
from mempo_ray.actors.rollout_pool import Member, WaitingShare
from mempo_ray.config.load import load_file
from mempo_ray.errors import EngineFailed, ToolFailed
from mempo_ray.placement.elastic import Bounds

SLOTS = 4
ELASTIC = ("rollout.max_replicas=3", f"rollout.max_num_seqs={SLOTS}", "rollout.scaling.down_idle_s=60")


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakePool:
    """Does what it is told, at once: who is asked for starts when `start` says so, who retires is gone."""

    members: list[Member] = field(default_factory=list)
    busy: dict[str, int] = field(default_factory=dict)  # requests by engine
    waiting: int = 0
    asked: int = 0
    retired: list[str] = field(default_factory=list)
    waiting_share: WaitingShare = field(default_factory=WaitingShare)

    def add(self, node: str = "n0", state: str = "serving") -> Member:
        index = len(self.members) + len(self.retired)
        self.members.append(Member(f"rollout-{index}", None, index, state, node))
        return self.members[-1]

    def grow(self, count: int) -> None:
        self.asked += count
        for _ in range(count):
            self.add(node="", state="starting")

    def start(self, node: str = "n1") -> None:
        for member in self.members:
            if member.state == "starting":
                member.state, member.node = "serving", node

    def retire(self, name: str, because: str) -> None:
        self.retired.append(name)
        self.members = [m for m in self.members if m.name != name]

    async def load_of(self, member: Member) -> Mapping[str, float]:
        return {"num_in_flight": self.busy.get(member.name, 0)}

    async def requests_waiting(self) -> int:
        return self.waiting


class Kept:
    """A keeper, its pool of one engine on node n0, its clock, and the nodes that are about to go."""

    def __init__(self, *words: str, is_retrieval: bool = False) -> None:
        self.pool, self.clock, self.going = FakePool(), FakeClock(), set()
        self.pool.add()
        config = load_file(None, words)
        size = retrieval_size(config) if is_retrieval else rollout_size(config)
        self.keeper = PoolKeeper(self.pool, size, self.clock, lambda: frozenset(self.going))

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.keeper.tick()
            self.clock.advance(1)


async def test_a_pool_that_is_whole_is_left_alone():
    kept = Kept()
    await kept.look(1000)
    assert (kept.pool.asked, kept.pool.retired) == (0, [])


async def test_the_last_engine_of_a_node_that_goes_stays_until_its_successor_serves():
    kept = Kept()
    kept.going.add("n0")
    await kept.look(3)
    assert (kept.pool.asked, kept.pool.retired) == (1, [])
    kept.pool.start("n1")
    await kept.look(3)
    assert (kept.pool.asked, kept.pool.retired) == (1, ["rollout-0"])


async def test_with_others_in_service_an_engine_leaves_its_node_at_once():
    kept = Kept("rollout.replicas=2", "rollout.max_replicas=2", "rollout.min_replicas=2")
    kept.pool.add("n1")
    kept.going.add("n0")
    await kept.look()
    assert (kept.pool.asked, kept.pool.retired) == (1, ["rollout-0"])


async def test_a_queue_grows_an_elastic_pool_and_idleness_shrinks_it_back():
    kept = Kept(*ELASTIC)
    kept.pool.busy["rollout-0"] = 3 * SLOTS
    await kept.look(12)
    assert kept.pool.asked == 2
    kept.pool.start()
    kept.pool.busy.clear()
    await kept.look(90)
    assert (kept.pool.retired, [m.name for m in kept.pool.members]) == (["rollout-1", "rollout-2"], ["rollout-0"])
    await kept.look(90)
    assert kept.pool.asked == 2


async def test_turns_that_no_engine_has_count_as_a_queue():
    kept = Kept(*ELASTIC)
    kept.pool.waiting = 2 * SLOTS
    await kept.look(12)
    assert kept.pool.asked == 1


async def test_an_elastic_pool_gives_up_an_engine_beyond_its_least_size_and_does_not_ask_for_it_again_at_once():
    kept = Kept(*ELASTIC)
    kept.pool.busy["rollout-0"] = 3 * SLOTS
    await kept.look(12)
    failed = kept.pool.members[-1]
    assert kept.keeper.can_do_without(failed)
    kept.pool.members.remove(failed)
    kept.pool.busy.clear()
    await kept.look(5)
    assert kept.pool.asked == 2
    assert not kept.keeper.can_do_without(kept.pool.members[0]) or len(kept.pool.members) > 1


async def test_a_fixed_pool_can_do_without_nobody():
    kept = Kept()
    assert not kept.keeper.can_do_without(kept.pool.add())


async def test_too_few_engines_for_too_long_end_the_run_though_no_sync_asks():
    kept = Kept("rollout.startup_timeout_s=30")
    await kept.look(5)
    (member,) = kept.pool.members
    member.state, member.failure = "dead", "out of memory"
    await kept.look(30)
    member.state = "serving"
    await kept.look(30)
    member.state = "dead"
    with pytest.raises(EngineFailed, match=r"rollout\.min_replicas.*rollout-0 is dead \(out of memory\)"):
        await kept.look(40)


@pytest.mark.parametrize(
    ("words", "is_elastic"),
    [
        (("rollout.max_replicas=3",), True),
        (("rollout.replicas=2", "rollout.min_replicas=2", "rollout.max_replicas=2"), False),
        (("rollout.max_replicas=3", "placement.layout=colocated"), False),
    ],
)
def test_a_pool_is_elastic_between_two_bounds_unless_its_engines_share_gpus(words, is_elastic):
    assert (rollout_size(load_file(None, words)).bounds is not None) == is_elastic


@pytest.mark.parametrize(
    ("words", "bounds"),
    [
        ((), None),
        (("replicas=2",), None),
        (("max_replicas=3", "max_batch=8"), Bounds(1, 3, slots=8)),
        (("replicas=2", "min_replicas=1"), Bounds(1, 2, slots=64)),
        (("max_replicas=3", "mode=replay", "record=searches.arrow"), None),
    ],
)
def test_a_retrieval_pool_is_elastic_where_a_bound_differs_from_its_size_and_searches_need_an_index(words, bounds):
    assert retrieval_size(load_file(None, [f"retrieval.{word}" for word in words])).bounds == bounds


async def test_queries_in_flight_grow_the_pool_of_retrieval_replicas_and_idleness_shrinks_it_back():
    words = ("retrieval.max_replicas=3", f"retrieval.max_batch={SLOTS}", "retrieval.scaling.down_idle_s=60")
    kept = Kept(*words, is_retrieval=True)
    first = kept.pool.members[0].name
    kept.pool.busy[first] = 2 * SLOTS
    await kept.look(12)
    assert kept.pool.asked == 1
    kept.pool.start()
    kept.pool.busy.clear()
    await kept.look(90)
    assert ([m.name for m in kept.pool.members], len(kept.pool.retired)) == ([first], 1)


async def test_retrieval_does_not_grow_where_the_run_hardly_waits_for_episodes():
    kept = Kept("retrieval.max_replicas=3", f"retrieval.max_batch={SLOTS}", is_retrieval=True)
    kept.pool.busy[kept.pool.members[0].name] = 2 * SLOTS
    kept.pool.waiting_share.value = 0.1
    await kept.look(30)
    assert kept.pool.asked == 0


async def test_too_few_retrieval_replicas_for_too_long_end_the_run_with_the_keys():
    kept = Kept("retrieval.max_replicas=3", "policy.startup_timeout_s=30", is_retrieval=True)
    kept.pool.members[0].state = "starting"
    with pytest.raises(ToolFailed, match=r"retrieval\.min_replicas.*policy\.startup_timeout_s=30"):
        await kept.look(40)


async def test_an_engine_on_a_rank_s_gpu_stays_with_it_when_its_node_is_about_to_go():
    kept = Kept("placement.layout=colocated", "policy.device=cuda")
    kept.going.add("n0")
    await kept.look(3)
    assert (kept.pool.asked, kept.pool.retired) == (0, [])


def test_the_share_of_waiting_is_that_of_the_last_whole_cycle():
    clock, share = FakeClock(), WaitingShare()
    for generated_s, rest_s in ((10, 30), (20, 20)):
        with share.waiting(clock):
            clock.advance(generated_s)
        clock.advance(rest_s)
    assert share.value == 0.25
    with share.waiting(clock):
        assert share.value == 0.5
