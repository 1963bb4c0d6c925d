"""The trajectory log: every token of a step with what was said about it, one Parquet row a turn (X4).

Beside the payload's columns (contracts/trajectory.py) a row has, repeated over its trajectory: `score`,
`excluded_because`, `reward_extra_keys` (all that were reported in the step), `reward_extra_info` (JSON, null for a key
that this trajectory lacks); of its own turn: `outcome_advantage`, `memory_advantage`, `p_mem`, `p_full`,
`memory_reward`, `scorer_version`; and by output token: `rm_scores`, `token_level_scores`, `token_level_rewards`
(rewards/contract.py). Null: there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mempo_ray.agent.prompt import PastTurn, Renderer
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import Ragged, Scored, TrajectoryBatch
from mempo_ray.experience import Sample
from mempo_ray.rewards.contract import REWARD_COLUMNS, reward_extra_info, with_rewards

Advantages = Mapping[tuple[str, int], tuple[tuple[float, ...], tuple[float, ...]]]
"""(task id, sibling) → outcome advantage and memory advantage, both by turn (experience.Assembled.advantages)."""


def log_tables(
    batches: Sequence[TrajectoryBatch], samples: Sequence[Sample], advantages: Advantages, kl_coef: float = 0.0
) -> list[pa.Table]:
    """The log rows of each trajectory of a step, all of one schema. `kl_coef`: κ of the step."""
    info = reward_extra_info([sample.extra for sample in samples])
    return [
        _log_table(batch, sample, advantages, {key: values[i] for key, values in info.items()}, kl_coef)
        for i, (batch, sample) in enumerate(zip(batches, samples, strict=True))
    ]


def _log_table(
    batch: TrajectoryBatch, sample: Sample, advantages: Advantages, extra: Mapping[str, object], kl_coef: float
) -> pa.Table:
    num_rows = len(batch)
    outcome_S, memory_S = advantages.get(sample.key, ((None,) * num_rows,) * 2)
    by_turn = {m.turn: m for m in sample.memory}
    memory = [by_turn.get(turn) for turn in range(num_rows)]
    score = sample.score.score if isinstance(sample.score, Scored) else None
    columns = {
        "score": pa.array([score] * num_rows, pa.float64()),
        "excluded_because": pa.array([sample.excluded_because] * num_rows, pa.string()),
        "outcome_advantage": pa.array(outcome_S, pa.float64()),
        "memory_advantage": pa.array(memory_S, pa.float64()),
        "p_mem": pa.array([m and m.p_mem for m in memory], pa.float64()),
        "p_full": pa.array([m and m.p_base for m in memory], pa.float64()),
        "memory_reward": pa.array([m and m.reward for m in memory], pa.float64()),
        "scorer_version": pa.array([m and m.scorer_version for m in memory], pa.int64()),
        "reward_extra_keys": pa.array([list(extra)] * num_rows, pa.list_(pa.string())),
        "reward_extra_info": pa.array([json.dumps(extra, default=str)] * num_rows, pa.string()),
        **_token_rewards(batch, sample, kl_coef),
    }
    table = batch.select([name for name in batch.columns if name not in REWARD_COLUMNS]).to_arrow()
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


def _token_rewards(batch: TrajectoryBatch, sample: Sample, kl_coef: float) -> dict[str, pa.Array]:
    """The columns of the contract, lists of float32; null for a trajectory that does not count."""
    if sample.excluded_because is not None or not isinstance(sample.score, Scored):
        return {name: pa.nulls(len(batch), pa.large_list(pa.float32())) for name in REWARD_COLUMNS}
    kl = None if sample.kl_T is None else Ragged(sample.kl_T, batch.ragged["output_mask"].offsets)
    rewards = with_rewards(batch, [sample.score], kl, kl_coef).ragged
    return {
        name: pa.LargeListArray.from_arrays(pa.array(rewards[name].offsets), pa.array(rewards[name].values))
        for name in REWARD_COLUMNS
    }


def drifted_turns(batch: TrajectoryBatch, renderer: Renderer, agent: Agent) -> int:
    """Turns whose stored prompt is not the one that their stored history gives: trained ids ≠ sampled ids."""
    drifted = 0
    for trajectory in batch.trajectories():
        history: list[PastTurn] = []
        for turn in trajectory.turns:
            expected = renderer.next_prompt(trajectory.turns[0].prompt_ids, history, agent)
            drifted += not np.array_equal(expected, turn.prompt_ids)
            history.append(PastTurn(turn.output_ids, turn.tool_ids, turn.memory_ids))
    return drifted


def read_memories(path: Path) -> dict[str, list[list[int]]]:
    """task_id → memory ids of each turn, from a logged evaluation."""
    table = pq.read_table(path, columns=["task_id", "memory_ids"])
    memories: dict[str, list[list[int]]] = {}
    for task_id, ids in zip(table["task_id"].to_pylist(), table["memory_ids"].to_pylist(), strict=True):
        memories.setdefault(task_id, []).append(ids)
    return memories
