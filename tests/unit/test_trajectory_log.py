"""The trajectory log: what a row says beside the payload, and the drift that is measured on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from mempo_ray.agent.prompt import PastTurn, Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.algo.memory_reward import MemorySample
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import Finished, PayloadRef, Scored, Trajectory, TrajectoryBatch, Unscored
from mempo_ray.experience import Sample
from mempo_ray.trajectory_log import drifted_turns, log_table, read_memories
from tests.fakes.trajectories import trajectory, turn

AGENT = Agent()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    folder = model_folder("builtin:tiny")
    return Renderer.from_folder(folder, FileTokenizer.from_folder(folder), AGENT)


def sampled(renderer: Renderer, num_turns: int = 3) -> Trajectory:
    """An episode whose prompts are assembled as the agent does."""
    initial, history, turns = renderer.initial_ids("mentor Boko and home Vela ?"), [], []
    for number in range(num_turns):
        prompt = renderer.next_prompt(initial, history, AGENT)
        one = replace(turn(mask=(1,) * (4 + number)), prompt_ids=prompt, tool_ids=np.array([5, 6], np.int32))
        turns.append(one)
        history.append(PastTurn(one.output_ids, one.tool_ids, one.memory_ids))
    return trajectory(turns=turns)


def sample(of: Trajectory, score=None, memory=()) -> Sample:
    return Sample(Finished(of.summary(), PayloadRef("q1/0", None)), score or Scored(0.5), memory)


def test_prompts_that_follow_from_their_history_do_not_drift(renderer):
    assert drifted_turns(TrajectoryBatch.from_trajectories([sampled(renderer)] * 2), renderer, AGENT) == 0


def test_each_turn_with_another_prompt_than_its_history_gives_is_counted(renderer):
    episode = sampled(renderer)
    changed = replace(episode.turns[1], prompt_ids=np.append(episode.turns[1].prompt_ids, 9).astype(np.int32))
    broken = replace(episode, turns=(episode.turns[0], changed, episode.turns[2]))
    assert drifted_turns(TrajectoryBatch.from_trajectories([episode, broken]), renderer, AGENT) == 1

    retokenised = replace(episode.turns[0], output_ids=episode.turns[0].output_ids + 1)
    broken = replace(episode, turns=(retokenised, *episode.turns[1:]))
    assert drifted_turns(TrajectoryBatch.from_trajectories([broken]), renderer, AGENT) == 1


def test_a_row_has_its_turn_s_memory_numbers_and_its_trajectory_s_score(renderer):
    episode = sampled(renderer)
    memory = (MemorySample(1, reward=0.2, p_mem=0.5, p_base=0.3, weight_version=4, scorer_version=4),)
    advantages = {("q1", 0): ((0.7, 0.7, 0.6), (0.0, 1.5, 0.0))}
    rows = log_table(
        TrajectoryBatch.from_trajectories([episode]), sample(episode, memory=memory), advantages
    ).to_pylist()

    assert [row["score"] for row in rows] == [0.5] * 3
    assert [row["outcome_advantage"] for row in rows] == [0.7, 0.7, 0.6]
    assert [row["memory_advantage"] for row in rows] == [0.0, 1.5, 0.0]
    assert [row["p_mem"] for row in rows] == [None, 0.5, None]
    assert [row["p_full"] for row in rows] == [None, 0.3, None]
    assert [row["scorer_version"] for row in rows] == [None, 4, None]
    assert {row["excluded_because"] for row in rows} == {None}


def test_an_excluded_trajectory_is_logged_with_its_reason_and_without_numbers(renderer):
    episode = sampled(renderer)
    unscored = sample(episode, Unscored("took 30 s", "timeout"))
    rows = log_table(TrajectoryBatch.from_trajectories([episode]), unscored, {}).to_pylist()
    for row in rows:
        assert row["excluded_because"] == "unscored: timeout: took 30 s"
        assert (row["score"], row["outcome_advantage"], row["memory_advantage"]) == (None, None, None)


def test_memories_are_read_back_by_task_and_turn(renderer, tmp_path):
    episode = sampled(renderer, 2)
    turns = tuple(replace(t, memory_ids=np.array([n, n], np.int32)) for n, t in enumerate(episode.turns))
    episode = replace(episode, turns=turns)
    pq.write_table(log_table(TrajectoryBatch.from_trajectories([episode]), sample(episode), {}), tmp_path / "e.parquet")
    assert read_memories(tmp_path / "e.parquet") == {"q1": [[0, 0], [1, 1]]}
