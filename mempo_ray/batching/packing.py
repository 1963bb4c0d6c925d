"""Who computes what: shares of work for the FSDP ranks. Decisions only; deterministic in their arguments.

    micro-batch of LogProbRequests ─┐
    TrainPlan ──────────────────────┼──▶ one RankShare a rank ──▶ PolicyWorker.run(sequence, command, *payloads)
    SftBatch ───────────────────────┘

A share may be empty: its rank still takes part in every collective. Payload handles are taken out of the
command (`handle=None`) and stand beside it, since Ray fetches top-level arguments only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mempo_ray.contracts import Command, LogProbRequest, ScoreCommand, SftBatch, SftCommand, TrainCommand
from mempo_ray.contracts.training import TrainPlan


@dataclass(frozen=True)
class RankShare:
    """What one rank is sent: a command without handles, and the payloads (references or values) it indexes."""

    command: Command
    payloads: tuple[object, ...] = ()


def split_between_ranks(costs: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """Indices into `costs` for each rank: balanced (dearest first, to the least loaded), order kept inside a rank.

    The largest share is at most 4/3 of the best possible (Graham 1969). Equal costs fall to the lower index and
    equal loads to the lower rank, so the same arguments give the same split in every run.

    Example:
        >>> split_between_ranks([5, 1, 4, 2], 2)
        [(0, 1), (2, 3)]
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    return [tuple(sorted(share)) for share in shares]


AFFINITY_SLACK = 1.1
"""How much longer than in the plain split the longest share may be, for tokens that are computed once."""


def split_by_affinity(costs: Sequence[int], affinities: Sequence[str], num_ranks: int) -> list[tuple[int, ...]]:
    """As `split_between_ranks`, but items of one affinity ("" = none) stay together where ranks stay balanced.

    The dearest group comes first. An item follows its group while that share stays within `AFFINITY_SLACK` times the
    longest of the plain split; else it goes to the least loaded rank, and the rest of the group after it. Where a share
    exceeds that all the same, the plain split it is.

    Example:
        >>> split_by_affinity([3, 3, 3, 3], ["a", "b", "a", "b"], 2)
        [(0, 2), (1, 3)]
    """
    plain = split_between_ranks(costs, num_ranks)
    groups: dict[object, list[int]] = {}
    for index, affinity in enumerate(affinities):
        groups.setdefault(affinity or index, []).append(index)
    most = AFFINITY_SLACK * max(sum(costs[i] for i in share) for share in plain)
    loads = [0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for members in sorted(groups.values(), key=lambda g: (-sum(costs[i] for i in g), g[0])):
        rank = loads.index(min(loads))
        for index in members:
            if loads[rank] + costs[index] > most:
                rank = loads.index(min(loads))
            shares[rank].append(index)
            loads[rank] += costs[index]
    return [tuple(sorted(share)) for share in shares] if max(loads) <= most else plain


def score_shares(requests: Sequence[LogProbRequest], split: Sequence[Sequence[int]]) -> list[RankShare]:
    """One ScoreCommand a rank for a micro-batch of requests on one model. `split[rank]` are indices of requests.

    A payload that several requests of a rank read is sent to it once.
    """
    model = requests[0].model
    shares = []
    for indices in split:
        chosen = [requests[i] for i in indices]
        payloads = {r.payload.key: r.payload.handle for r in chosen if r.payload is not None}
        position = {key: i for i, key in enumerate(payloads)}
        command = ScoreCommand(
            requests=tuple(replace(r, payload=r.payload and replace(r.payload, handle=None)) for r in chosen),
            payload_index=tuple(-1 if r.payload is None else position[r.payload.key] for r in chosen),
            model=model,
        )
        shares.append(RankShare(command, tuple(payloads.values())))
    return shares


def train_shares(plan: TrainPlan, num_ranks: int) -> list[RankShare]:
    """One TrainCommand a rank: each mini-batch is split by the tokens of its rows, so that all ranks step alike.

    N of the loss (`num_trajectories`) counts a mini-batch over all ranks, whatever the split.
    """
    items: list[list[int]] = [[] for _ in range(num_ranks)]
    mini_batch: list[list[int]] = [[] for _ in range(num_ranks)]
    for number, members in enumerate(plan.mini_batches):
        costs = [plan.items[i].summary.num_row_tokens for i in members]
        for rank, chosen in enumerate(split_between_ranks(costs, num_ranks)):
            items[rank] += [members[i] for i in chosen]
            mini_batch[rank] += [number] * len(chosen)
    shares = []
    for rank in range(num_ranks):
        chosen = [plan.items[i] for i in items[rank]]
        command = TrainCommand(
            step=plan.step,
            items=tuple(replace(item, payload=replace(item.payload, handle=None)) for item in chosen),
            mini_batch=tuple(mini_batch[rank]),
            num_mini_batches=len(plan.mini_batches),
            num_trajectories=tuple(len(members) for members in plan.mini_batches),
        )
        shares.append(RankShare(command, tuple(item.payload.handle for item in chosen)))
    return shares


def sft_shares(batch: SftBatch, command: SftCommand, num_ranks: int) -> list[RankShare]:
    """The rows of one supervised optimiser step, split by tokens."""
    costs: np.ndarray = batch.ragged["prompt_ids"].lengths + batch.ragged["output_ids"].lengths
    return [RankShare(command, (batch.take(rows),)) for rows in split_between_ranks(costs.tolist(), num_ranks)]
