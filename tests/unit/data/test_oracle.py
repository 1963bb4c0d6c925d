import os
from pathlib import Path

import pytest

from mempo_ray.contracts.trajectory import Passage, Task
from mempo_ray.data.oracle import oracle_trajectories, oracle_trajectory
from mempo_ray.data.tasks import read_tasks
from mempo_ray.data.world import AtlasSpec, build_atlas, synthetic_tasks

SHARED = Path(os.environ.get("MEMPO_SHARED", Path(__file__).parents[3].parent / "shared"))


class WordSearch:
    """Ranks passages by shared words; remembers the queries."""

    def __init__(self, passages):
        self.passages = list(passages)
        self.queries = []

    async def __call__(self, queries, top_k):
        self.queries += queries
        return [sorted(self.passages, key=lambda p: -self._shared(q, p))[:top_k] for q in queries]

    @staticmethod
    def _shared(query, passage):
        return len(set(query.lower().split()) & set(f"{passage.title} {passage.text}".lower().split()))


WORLD_SEARCH = WordSearch(build_atlas(AtlasSpec()).passages())


async def test_in_the_world_memory_grows_by_one_fact_a_turn_and_starts_with_nothing():
    task = next(t for t in synthetic_tasks("synthetic:eval") if t.metadata["hops"] == 3)
    trajectory = await oracle_trajectory(task, WORLD_SEARCH)
    assert [turn.memory for turn in trajectory.turns] == [
        "nothing", *(" ".join(trajectory.facts[:n]) for n in (1, 2, 3)),
    ]  # fmt: skip
    assert [turn.query for turn in trajectory.turns] == [f"{r} {s}" for r, s, *_ in task.metadata["chain"]] + [None]
    assert [turn.answer for turn in trajectory.turns] == [None, None, None, task.gold_text]


async def test_no_memory_says_what_no_earlier_search_returned():
    for trajectory in await oracle_trajectories(synthetic_tasks("synthetic:train?tasks=40"), WORLD_SEARCH):
        read = ""
        for turn in trajectory.turns:
            assert turn.memory == "nothing" or all(fact in read for fact in turn.memory.split(" . "))
            assert turn.answer or turn.needed_passage_ids
            read += " ".join(p.text for p in turn.passages)


async def test_a_trajectory_whose_needed_passage_was_not_returned_is_dropped():
    task = synthetic_tasks("synthetic:eval")[0]
    needed = task.metadata["chain"][1][3]
    blind = WordSearch(p for p in WORLD_SEARCH.passages if p.id != needed)
    assert await oracle_trajectory(task, blind) is None
    assert await oracle_trajectories([task], blind) == []


async def test_a_foreign_fact_replaces_the_one_that_only_memory_carries():
    mine, other = await oracle_trajectories(synthetic_tasks("synthetic:eval")[:2], WORLD_SEARCH)
    assert mine.memory_with_foreign_fact(other) == " ".join((other.facts[0], *mine.facts[1:]))


async def test_2wiki_evidences_become_searches_and_short_memories():
    task = Task(
        "w", "When was the director of Jaws born?", (("18 December 1946",),), "2wikimultihopqa",
        {"evidences": [["Jaws", "director", "Steven Spielberg"],
                       ["Steven Spielberg", "date of birth", "18 December 1946"]],
         "supporting_ids": ["p1", "p2"]},
    )  # fmt: skip
    search = WordSearch([
        Passage("p1", "Jaws (film)", "Jaws is a film."),
        Passage("p2", "Spielberg", "He was born on December 18, 1946 or 18 December 1946."),
        Passage("p3", "Steven Spielberg", "Not the gold passage."),
    ])  # fmt: skip
    trajectory = await oracle_trajectory(task, search)
    assert search.queries == ["Jaws director", "Steven Spielberg date of birth"]
    assert [turn.needed_passage_ids for turn in trajectory.turns] == [("p1",), ("p2",), ()]
    assert trajectory.turns[0].memory == "Nothing is known yet."
    assert trajectory.turns[1].memory == "Jaws director: Steven Spielberg."
    assert trajectory.turns[1].thought == "I need the date of birth of Steven Spielberg."
    assert trajectory.turns[2].answer == "18 December 1946"


async def test_musique_sub_questions_name_the_answers_they_build_on():
    task = Task(
        "m", "q", (("Last Vegas",),), "musique",
        {"decomposition": [
            {"question": "The Jewel of the Nile >> producer", "answer": "Michael Douglas", "supporting_id": "p1"},
            {"question": "which movie stars #1 ?", "answer": "Last Vegas", "supporting_id": "p2"}]},
    )  # fmt: skip
    search = WordSearch([Passage("p1", "The Jewel of the Nile", "t"), Passage("p2", "Last Vegas", "Michael Douglas")])
    trajectory = await oracle_trajectory(task, search)
    assert search.queries == ["The Jewel of the Nile producer", "which movie stars Michael Douglas"]
    assert trajectory.turns[-1].memory == (
        "The Jewel of the Nile producer: Michael Douglas. which movie stars Michael Douglas: Last Vegas."
    )


async def test_a_row_without_hops_has_no_oracle():
    assert await oracle_trajectory(Task("h", "q", (("a",),), "hotpotqa", {"hops": 2}), WORLD_SEARCH) is None


@pytest.mark.skipif(not (SHARED / "data/mini").is_dir(), reason="the shared data is not on this machine")
async def test_the_shared_questions_with_hops_all_have_a_plan():
    from mempo_ray.data.oracle import plan_of

    tasks = read_tasks(str(SHARED / "data/mini/train.jsonl"))
    with_hops = [t for t in tasks if t.metadata.get("evidences") or t.metadata.get("decomposition")]
    assert with_hops
    assert all(len(plan_of(t).hops) >= 2 for t in with_hops)
