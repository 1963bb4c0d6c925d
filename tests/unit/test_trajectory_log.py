"""The trajectory log: what a row says beside the payload, and the drift that is measured on it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pyarrow.parquet as pq
import pytest

from mempo_ray.agent.prompt import PastTurn, Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.algo.memory_reward import MemorySample
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import Finished, PayloadRef, Ragged, Scored, Trajectory, TrajectoryBatch, Unscored
from mempo_ray.experience import Sample
from mempo_ray.trajectory_log import drifted_turns, log_tables, read_memories
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


def logged(episode: Trajectory, of: Sample, advantages=MappingProxyType({}), kl_coef: float = 0.0) -> list[dict]:
    (table,) = log_tables([TrajectoryBatch.from_trajectories([episode])], [of], advantages, kl_coef)
    return table.to_pylist()


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
    rows = logged(episode, sample(episode, memory=memory), advantages)

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
    for row in logged(episode, unscored):
        assert row["excluded_because"] == "unscored: timeout: took 30 s"
        names = "score", "outcome_advantage", "memory_advantage", "rm_scores", "token_level_rewards"
        assert [row[name] for name in names] == [None] * 5


def test_a_row_has_the_rewards_of_its_tokens(renderer):
    episode = sampled(renderer)
    kl_T = np.arange(15) / 10
    scored = replace(sample(episode, Scored(1.0, process_scores=(0.0, 0.5, 0.25))), kl_T=kl_T)
    rows = logged(episode, scored, kl_coef=0.5)
    assert [row["rm_scores"] for row in rows] == [[0] * 4, [0] * 4 + [0.5], [0] * 5 + [1.25]]
    assert [row["token_level_scores"] for row in rows] == [row["rm_scores"] for row in rows]
    rewards = [value for row in rows for value in row["token_level_rewards"]]
    assert sum(rewards) == pytest.approx(1.75 - 0.5 * scored.kl)
    assert rewards[:2] == pytest.approx([0, -0.05])


def test_scores_that_a_payload_brings_are_logged_as_they_are(renderer):
    episode = sampled(renderer)
    without = batch = TrajectoryBatch.from_trajectories([episode])
    given = Ragged(np.linspace(0, 1, 15, dtype=np.float32), batch.ragged["output_mask"].offsets)
    batch = TrajectoryBatch({**batch.ragged, "rm_scores": given}, batch.fixed, batch.table)
    plain, brought = log_tables([without, batch], [sample(episode), sample(episode)], {})
    assert plain.schema == brought.schema
    assert [v for row in brought.to_pylist() for v in row["token_level_rewards"]] == given.values.tolist()


def test_all_that_was_reported_in_a_step_is_a_key_of_each_row(renderer):
    episode = sampled(renderer)
    memory = (MemorySample(1, reward=0.2, p_mem=0.5, p_base=0.3, weight_version=4, scorer_version=4),)
    samples = [
        sample(episode, Scored(1.0, {"exact_match": (1.0,), "why": "same"}), memory),
        sample(episode, Unscored("took 30 s", "timeout")),
    ]
    tables = log_tables([TrajectoryBatch.from_trajectories([episode])] * 2, samples, {})
    assert tables[0].schema == tables[1].schema
    first, second = (table.to_pylist()[0] for table in tables)
    keys = ["exact_match", "why", "traj_avg_mem_reward"]
    assert first["reward_extra_keys"] == second["reward_extra_keys"] == keys
    info = {"exact_match": [1.0], "why": "same", "traj_avg_mem_reward": 0.2}
    assert json.loads(first["reward_extra_info"]) == info
    assert json.loads(second["reward_extra_info"]) == dict.fromkeys(keys)


def test_memories_are_read_back_by_task_and_turn(renderer, tmp_path):
    episode = sampled(renderer, 2)
    turns = tuple(replace(t, memory_ids=np.array([n, n], np.int32)) for n, t in enumerate(episode.turns))
    episode = replace(episode, turns=turns)
    (table,) = log_tables([TrajectoryBatch.from_trajectories([episode])], [sample(episode)], {})
    pq.write_table(table, tmp_path / "e.parquet")
    assert read_memories(tmp_path / "e.parquet") == {"q1": [[0, 0], [1, 1]]}
