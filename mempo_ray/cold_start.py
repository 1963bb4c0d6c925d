"""The cold start (M12): oracle trajectories, searched in the real index, taught by supervised fine-tuning.

    Task ──oracle──▶ OracleTrajectory ──Renderer──▶ SftBatch ──RayPolicy.fit, a step at a time──▶ metrics

A trajectory is kept where the index found each hop's passage and `agent.limits.tool_tokens` let it be read.

Rows are the prompts that a rollout would see, made by the same renderer. `cold_start.probe_share` adds rows in the
two scoring forms of algorithm.md §3, so that P(answer | context) means something from the first RL step on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mempo_ray.agent.memory import encode_probe
from mempo_ray.agent.prompt import PastTurn, Renderer, SftRow
from mempo_ray.agent.protocol import write_turn
from mempo_ray.config.schema import ColdStart, Config
from mempo_ray.contracts import Ragged, SftBatch, Task
from mempo_ray.data.oracle import OracleTrajectory, OracleTurn, oracle_trajectories, plan_of
from mempo_ray.errors import DataError
from mempo_ray.evaluation.probes import ProbeContexts
from mempo_ray.ports import Search
from mempo_ray.training.sft import num_sft_steps, num_target_tokens, sft_batches, sft_lr


class Fit(Protocol):
    """One supervised optimiser step (RayPolicy.fit)."""

    async def __call__(self, batch: SftBatch, lr: float, num_target_tokens: int) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class ColdStartReport:
    """What was kept and how it went. `num_tasks` were walked for it; `loss` is the mean over the last tenth of the
    steps, per target token."""

    num_tasks: int
    num_kept: int
    num_rows: int
    num_steps: int
    loss: float


async def run_cold_start(
    tasks: Sequence[Task],
    settings: ColdStart,
    config: Config,
    renderer: Renderer,
    search: Search,
    fit: Fit,
    on_stage: Callable[[str, int], None],
    on_step: Callable[[], None],
) -> ColdStartReport:
    """Write, filter and render the oracle trajectories, then train on them.

    Raises:
        DataError: no trajectory was kept; says what the tasks must hold.
    """
    trajectories, num_walked = await keep_trajectories(tasks, settings.tasks, config, renderer, search)
    if not trajectories:
        raise DataError(
            "cold_start: the oracle kept no trajectory: data.train holds no hops (2Wiki `evidences`, MuSiQue "
            "`decomposition`, synthetic worlds), or their passages are not in the index or do not fit into "
            "agent.limits.tool_tokens; check retrieval.corpus, or remove the cold_start section and start from a "
            "policy that knows the format"
        )
    rows = sft_rows(trajectories, renderer, config, settings.probe_share)
    arguments = (settings.batch_tokens, settings.epochs, config.run.seed)
    total = num_sft_steps(rows, *arguments)
    on_stage("cold start", total)
    losses = []
    for step, batch in enumerate(sft_batches(rows, *arguments)):
        lr = sft_lr(step, total, settings.lr, settings.warmup_share)
        losses.append((await fit(batch, lr, num_target_tokens(batch)))["sft/loss"])
        on_step()
    last = losses[-max(1, total // 10) :]
    return ColdStartReport(num_walked, len(trajectories), len(rows), total, float(np.mean(last)))


async def keep_trajectories(
    tasks: Sequence[Task], wanted: int, config: Config, renderer: Renderer, search: Search
) -> tuple[list[OracleTrajectory], int]:
    """Walk the tasks in a seeded order until `wanted` trajectories are kept, or none is left.

    Returns the trajectories, and how many tasks with hops were walked for them.
    """
    order = [task for task in tasks if plan_of(task) is not None]
    random.Random(config.run.seed).shuffle(order)

    def is_read(trajectory: OracleTrajectory) -> bool:
        """Each hop's passage is in the tool response that a rollout would show: a memory says what was read."""
        searches = [turn for turn in trajectory.turns if turn.query is not None]
        limit = config.agent.limits.tool_tokens
        shown = [renderer.tool_ids(turn.passages, limit).passage_ids for turn in searches]
        return all(set(turn.needed_passage_ids) & set(ids) for turn, ids in zip(searches, shown, strict=True))

    kept: list[OracleTrajectory] = []
    num_walked = 0
    while len(kept) < wanted and num_walked < len(order):
        part = order[num_walked : num_walked + wanted - len(kept)]  # side by side, so that their searches are batched
        kept += filter(is_read, await oracle_trajectories(part, search, config.agent.top_k))
        num_walked += len(part)
    return kept, num_walked


def sft_rows(
    trajectories: Sequence[OracleTrajectory], renderer: Renderer, config: Config, probe_share: float
) -> SftBatch:
    """All turns of all trajectories, and the seeded share of scoring-form rows."""
    rng = random.Random(config.run.seed)
    rows: list[SftRow] = []
    for trajectory in trajectories:
        written = written_turns(trajectory, renderer, config)
        initial = renderer.initial_ids(trajectory.task.question)
        turn_rows = renderer.sft_rows(initial, written, config.agent)
        rows += turn_rows
        probes = probe_rows(initial, written, trajectory.task.gold_text, renderer)
        num_probes = probe_share * len(turn_rows)
        rows += rng.sample(probes, min(len(probes), int(num_probes) + (rng.random() < num_probes % 1)))
    return SftBatch(
        ragged={
            "prompt_ids": Ragged.from_rows([row.prompt_ids for row in rows], np.int32),
            "output_ids": Ragged.from_rows([row.output_ids for row in rows], np.int32),
        }
    )


def turn_text(turn: OracleTurn) -> str:
    """One turn in the format of algorithm.md §1."""
    return write_turn(turn.memory, turn.thought, search=turn.query, answer=turn.answer)


def written_turns(trajectory: OracleTrajectory, renderer: Renderer, config: Config) -> list[tuple[str, np.ndarray]]:
    """(output text, ids of its tool response; empty after the answer) of each turn."""
    empty = np.empty(0, np.int32)
    limit = config.agent.limits.tool_tokens
    return [
        (turn_text(turn), renderer.tool_ids(turn.passages, limit).ids if turn.query is not None else empty)
        for turn in trajectory.turns
    ]


def history_ids(initial: np.ndarray, past: Sequence[PastTurn]) -> np.ndarray:
    """int32: the full context of §3: the first prompt and every output and tool response so far."""
    return np.concatenate([initial, *(part for turn in past for part in (turn.output_ids, turn.tool_ids))])


def probe_rows(
    initial: np.ndarray, written: Sequence[tuple[str, np.ndarray]], gold: str, renderer: Renderer
) -> list[SftRow]:
    """The last turn in both scoring forms of §3: memory context → answer, full history → answer."""
    past = []
    for text, tool_ids in written:
        output_ids = renderer.output_ids(text)
        past.append(PastTurn(output_ids, tool_ids, renderer.memory_ids(output_ids)))
    answer = renderer.output_ids(f"<answer>{gold}</answer>")
    return [
        SftRow(np.concatenate([initial, past[-1].memory_ids]), answer),
        SftRow(history_ids(initial, past[:-1]), answer),
    ]


def probe_contexts(found: Sequence[OracleTrajectory], renderer: Renderer, config: Config) -> list[ProbeContexts]:
    """What `evaluation.probes` compares for each trajectory; the foreign fact is of another world."""
    contexts = []
    for trajectory, other in zip(found, from_other_worlds(found), strict=True):
        initial = renderer.initial_ids(trajectory.task.question)
        past = [
            PastTurn(ids := renderer.output_ids(text), tool_ids, renderer.memory_ids(ids))
            for text, tool_ids in written_turns(trajectory, renderer, config)
        ]
        foreign = replace(trajectory.turns[-1], memory=trajectory.memory_with_foreign_fact(other))
        foreign_ids = renderer.memory_ids(renderer.output_ids(turn_text(foreign)))
        contexts.append(
            ProbeContexts(
                trajectory.task.task_id,
                np.concatenate([initial, past[-1].memory_ids]),
                np.concatenate([initial, foreign_ids]),
                history_ids(initial, past[:-1]),
                initial,
                encode_probe("<answer>", trajectory.task.gold_text, "</answer>", renderer.tokenizer),
            )
        )
    return contexts


def from_other_worlds(found: Sequence[OracleTrajectory]) -> list[OracleTrajectory]:
    """For each trajectory the next one of another world (of another task, where there are no worlds)."""
    return [
        next((other for other in (*found[i + 1 :], *found[:i]) if _world(other) != _world(own)), own)
        for i, own in enumerate(found)
    ]


def _world(trajectory: OracleTrajectory) -> object:
    return trajectory.task.metadata.get("world", trajectory.task.task_id)
