"""Which oracle trajectories a cold start is taught: seeded, as many as asked for, and only what was really read."""

import asyncio

import pytest

from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.cold_start import keep_trajectories
from mempo_ray.config.schema import Agent, AgentLimits, Config, Run
from mempo_ray.contracts import Passage, Task
from tests.fakes.search import FakeSearch
from tests.fakes.tokenizer import byte_level_folder

LONG = Passage("long", "Long", "word " * 200)


def hop(n: int) -> list[str]:
    return ["mentor", f"Boko{n}", f"Sari{n}", f"p{n}"]


TASKS = [
    *(Task(f"no-hops-{n}", "q", (("a",),), "own", {}) for n in range(8)),
    *(Task(f"t{n}", "q", ((f"Sari{n}",),), "synthetic", {"chain": [hop(n)]}) for n in range(8)),
]


def found(n: int) -> list[Passage]:
    return [Passage(f"p{n}", "", f"mentor Boko{n} Sari{n} .")]


@pytest.fixture(scope="module")
def keep(tmp_path_factory):
    folder = byte_level_folder(tmp_path_factory.mktemp("model"))
    renderer = Renderer.from_folder(folder, FileTokenizer.from_folder(folder), Agent())

    def run(wanted, passages, seed=0, tool_tokens=256):
        config = Config(run=Run(seed=seed), agent=Agent(limits=AgentLimits(tool_tokens=tool_tokens)))
        search = FakeSearch({f"mentor Boko{n}": passages(n) for n in range(8)})
        kept, num_walked = asyncio.run(keep_trajectories(TASKS, wanted, config, renderer, search))
        return [trajectory.task.task_id for trajectory in kept], num_walked

    return run


def test_as_many_as_wanted_are_kept_and_tasks_without_hops_are_passed_over(keep):
    kept, num_walked = keep(3, found)
    assert len(kept) == num_walked == 3


def test_the_walk_goes_on_past_tasks_whose_passage_is_not_found(keep):
    kept, num_walked = keep(4, lambda n: found(n) if n % 2 else found(n + 1))
    assert sorted(kept) == ["t1", "t3", "t5", "t7"]
    assert num_walked >= 7


def test_fewer_than_wanted_are_all_that_there_are(keep):
    assert keep(100, found)[1] == 8


def test_the_order_depends_on_the_seed_alone(keep):
    assert keep(4, found) == keep(4, found)
    assert keep(4, found) != keep(4, found, seed=1)


def test_a_passage_that_the_tool_limit_cuts_off_was_not_read(keep):
    kept, _ = keep(8, lambda n: [*found(n), LONG] if n else [LONG, *found(n)], tool_tokens=128)
    assert sorted(kept) == [f"t{n}" for n in range(1, 8)]
