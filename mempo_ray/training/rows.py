"""Token rows: what a forward runs on. Numpy only; every decision here is a pure function of the order given.

    LogProbRequest ─ expand ────────┐
    TrajectoryBatch ─ policy_rows ──┼──▶ Row … ─ pack ──▶ micro-batches of row indices
    SftBatch ─ supervised_rows ─────┘

Axes: `_S` rows (one per turn), `_K` target tokens of one row, `_T` all its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mempo_ray.contracts import Batch, LogProbRequest, Segment, SftBatch, Slice, TrainItem, TrajectoryBatch
from mempo_ray.errors import DataError


@dataclass(frozen=True, eq=False)
class Row:
    """One plain causal sequence. `targets_K` are positions in `ids_T` whose log-probs are wanted, each ≥ 1.

    Example: prompt [5, 6], output [7, 8]: Row(ids_T=[5, 6, 7, 8], targets_K=[2, 3]).
    """

    ids_T: np.ndarray  # int64
    targets_K: np.ndarray  # int64
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class PolicyRow:
    """A row of the policy update, with what §5 needs for each of its target tokens (only mask-1 tokens)."""

    row: Row
    advantages_K: np.ndarray  # float32
    sampler_logprobs_K: np.ndarray  # float32
    trajectory_tokens: int  # |V(i)|: targets over all rows of the trajectory


DUMMY = Row(np.zeros(2, np.int64), np.ones(1, np.int64))
"""What a rank without rows runs, so that all ranks do the same number of forwards."""


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Consecutive indices whose lengths sum to at most `budget`; a longer row stands alone.

    Example: pack([4, 3, 5, 9], 8) == [[0, 1], [2], [3]].
    """
    groups: list[list[int]] = []
    used = budget
    for index, length in enumerate(lengths):
        if used + length > budget:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += length
    return groups


@dataclass(frozen=True)
class Limits:
    """What the model can be asked: ids below `vocab_size`, rows of at most `max_tokens`."""

    vocab_size: int
    max_tokens: int


def expand(request: LogProbRequest, payload: Batch | None, limits: Limits) -> list[Row]:
    """The forest as plain sequences: one row per marked segment, in the order of `request.marked`.

    Raises:
        DataError: a slice that the payload does not hold, a length that is not the segment's, a target without a
            token before it, a parent that does not precede its child, or a row outside `limits`.
    """
    if any(segment.parent >= index for index, segment in enumerate(request.segments)):
        raise DataError(f"request {request.id}: a segment's parent must precede it")
    ids = [_segment_ids(request, segment, payload) for segment in request.segments]
    rows = []
    for marked in request.marked:
        path = request.path(marked)
        ids_T = np.concatenate([ids[i] for i in path])
        start, stop = request.segments[marked].targets or (0, 0)
        offset = len(ids_T) - len(ids[marked])
        if not 0 <= start < stop <= len(ids[marked]):
            raise DataError(f"request {request.id}: targets {start}:{stop} of a segment of {len(ids[marked])} tokens")
        if offset + start == 0:
            raise DataError(f"request {request.id}: the first token of a row has no token to be predicted from")
        if len(ids_T) > limits.max_tokens:
            raise DataError(f"request {request.id}: a row of {len(ids_T)} tokens; the model sees {limits.max_tokens}")
        if ids_T.min() < 0 or ids_T.max() >= limits.vocab_size:
            raise DataError(f"request {request.id}: a token id outside the vocabulary of {limits.vocab_size}")
        rows.append(Row(ids_T, np.arange(offset + start, offset + stop), request.temperature))
    return rows


def _segment_ids(request: LogProbRequest, segment: Segment, payload: Batch | None) -> np.ndarray:
    source = segment.ids
    if isinstance(source, Slice):
        if payload is None or source.column not in payload.ragged or not 0 <= source.row < len(payload):
            raise DataError(f"request {request.id}: its payload has no {source.column}[{source.row}]")
        values = payload.ragged[source.column][source.row][source.start : source.stop]
    else:
        values = source
    if len(values) != segment.length:
        raise DataError(f"request {request.id}: a segment of {len(values)} tokens that states {segment.length}")
    return np.asarray(values, np.int64)


def policy_rows(
    item: TrainItem, payload: TrajectoryBatch, *, temperature: float, concatenated: bool
) -> list[PolicyRow]:
    """Rows of one trajectory: one per turn, with exactly the prompt that was sampled from (§5).

    A_k = A^T + λ·A^M of turn t inside its <mem> span, A^T elsewhere (§4); tokens with mask 0 are no targets.
    `concatenated` is the ablation: one row of all turns under plain causal attention.

    Raises:
        DataError: payload and item disagree in the number of turns.
    """
    if len(payload) != len(item.memory_advantage_S):
        raise DataError(
            f"task {item.summary.task_id} sibling {item.summary.sibling}: {len(payload)} turns in the payload, "
            f"{len(item.memory_advantage_S)} memory advantages"
        )
    turns = [_turn_row(item, payload, turn, temperature) for turn in range(len(payload))]
    if concatenated:
        turns = [_concatenate(turns, payload, temperature)]
    num_targets = sum(len(row.targets_K) for row, _, _ in turns)
    return [PolicyRow(row, adv, logp, num_targets) for row, adv, logp in turns if len(row.targets_K)]


_TurnRow = tuple[Row, np.ndarray, np.ndarray]  # row, advantages_K, sampler_logprobs_K


def _turn_row(item: TrainItem, payload: TrajectoryBatch, turn: int, temperature: float) -> _TurnRow:
    prompt, output = payload.ragged["prompt_ids"][turn], payload.ragged["output_ids"][turn]
    chosen = np.flatnonzero(payload.ragged["output_mask"][turn])
    advantages = np.full(len(output), item.outcome_advantage_S[turn], np.float32)
    start, stop = payload.fixed["mem_span"][turn]
    if start >= 0:
        advantages[start:stop] += np.float32(item.memory_advantage_S[turn])
    ids_T = np.concatenate([prompt, output]).astype(np.int64)
    row = Row(ids_T, len(prompt) + chosen, temperature)
    return row, advantages[chosen], payload.ragged["output_logprobs"][turn][chosen]


def _concatenate(turns: list[_TurnRow], payload: TrajectoryBatch, temperature: float) -> _TurnRow:
    """initial ++ output_1 ++ tool_1 ++ output_2 …: the first prompt, then what each turn added to it."""
    pieces, targets, length = [payload.ragged["prompt_ids"][0]], [], len(payload.ragged["prompt_ids"][0])
    for turn, (row, _, _) in enumerate(turns):
        targets.append(row.targets_K - len(payload.ragged["prompt_ids"][turn]) + length)
        pieces += [payload.ragged["output_ids"][turn], payload.ragged["tool_ids"][turn]]
        length += len(pieces[-2]) + len(pieces[-1])
    row = Row(np.concatenate(pieces).astype(np.int64), np.concatenate(targets), temperature)
    return row, np.concatenate([a for _, a, _ in turns]), np.concatenate([s for _, _, s in turns])


def supervised_rows(batch: SftBatch) -> list[Row]:
    """Rows whose targets are all output tokens, at temperature 1."""
    rows = []
    for prompt, output in zip(_rows(batch, "prompt_ids"), _rows(batch, "output_ids"), strict=True):
        ids_T = np.concatenate([prompt, output]).astype(np.int64)
        rows.append(Row(ids_T, np.arange(len(prompt), len(ids_T))))
    return rows


def _rows(batch: SftBatch, column: str) -> list[np.ndarray]:
    return [batch.ragged[column][row] for row in range(len(batch))]
