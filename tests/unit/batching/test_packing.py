"""Shares of work: complete, balanced, the same in every run, and without handles inside commands."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.batching.packing import (
    AFFINITY_SLACK,
    score_shares,
    sft_shares,
    split_between_ranks,
    split_by_affinity,
    train_shares,
)
from mempo_ray.contracts import (
    EndReason,
    LogProbRequest,
    PayloadRef,
    Ragged,
    Segment,
    SftBatch,
    SftCommand,
    Slice,
    TrainItem,
    TrainPlan,
    TrajectorySummary,
)


def item(index: int, tokens: int) -> TrainItem:
    summary = TrajectorySummary("q", index, 0, EndReason.ANSWERED, "", True, (tokens,), (0,), (0,), (0,), (0,), ())
    return TrainItem(PayloadRef(f"p{index}", f"h{index}"), summary, 0.0, (0.0,))


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 5))
def test_every_index_goes_to_one_rank_in_order_and_shares_are_balanced(costs, num_ranks):
    shares = split_between_ranks(costs, num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert all(list(share) == sorted(share) for share in shares)
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_equal_costs_fall_to_the_lower_rank_first():
    assert split_between_ranks([1, 1, 1], 2) == [(0, 2), (1,)]
    assert split_between_ranks([], 2) == [(), ()]


def loads_of(shares, costs) -> list[int]:
    return [sum(costs[i] for i in share) for share in shares]


@given(st.lists(st.tuples(st.integers(1, 1000), st.sampled_from(["", "a", "b", "c"])), max_size=40), st.integers(1, 5))
def test_a_split_by_affinity_loses_nobody_and_is_nearly_as_balanced_as_the_plain_one(items, num_ranks):
    costs, affinities = [cost for cost, _ in items], [affinity for _, affinity in items]
    shares = split_by_affinity(costs, affinities, num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert all(list(share) == sorted(share) for share in shares)
    plain = split_between_ranks(costs, num_ranks)
    assert max(loads_of(shares, costs)) <= AFFINITY_SLACK * max(loads_of(plain, costs))


def test_siblings_share_a_rank():
    costs, affinities = [5, 4, 6, 5, 5, 5, 6, 4], ["a", "b", "a", "b", "a", "b", "a", "b"]
    assert split_by_affinity(costs, affinities, 2) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_group_that_is_too_large_for_one_rank_is_split_and_the_rest_of_it_stays_together():
    assert split_by_affinity([1] * 8, ["a"] * 6 + ["b"] * 2, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_balance_comes_before_affinity():
    costs = [10, 9, 1, 1]  # together "a" would weigh 19 of 21
    shares = split_by_affinity(costs, ["a", "a", "", ""], 2)
    assert sorted(loads_of(shares, costs)) == [10, 11]


def test_a_payload_that_two_requests_of_a_rank_read_is_sent_once():
    def request(name: str, key: str | None) -> LogProbRequest:
        payload = None if key is None else PayloadRef(key, f"handle of {key}")
        return LogProbRequest(name, (Segment(-1, Slice("prompt_ids", 0), 3),), payload)

    requests = [request("a", "p"), request("b", None), request("c", "p"), request("d", "q")]
    first, second = score_shares(requests, [(0, 1, 2), (3,)])
    assert first.command.payload_index == (0, -1, 0)
    assert first.payloads == ("handle of p",)
    assert second.payloads == ("handle of q",)
    assert all(r.payload is None or r.payload.handle is None for s in (first, second) for r in s.command.requests)


def test_mini_batches_are_split_one_by_one_and_counted_over_all_ranks():
    plan = TrainPlan(1, 0, tuple(item(i, tokens) for i, tokens in enumerate([8, 8, 8, 1, 1])), ((2, 3), (0, 1, 4)))
    first, second = train_shares(plan, 2)
    assert first.command.num_trajectories == second.command.num_trajectories == (2, 3)
    assert (first.payloads, first.command.mini_batch) == (("h2", "h0", "h4"), (0, 1, 1))
    assert (second.payloads, second.command.mini_batch) == (("h3", "h1"), (0, 1))


def test_a_rank_without_rows_still_gets_its_command():
    ids = Ragged.from_rows([[1, 2]], np.int32)
    shares = sft_shares(SftBatch({"prompt_ids": ids, "output_ids": ids}), SftCommand(1e-3, 2), 3)
    assert [len(share.payloads[0]) for share in shares] == [1, 0, 0]
    empty = train_shares(TrainPlan(1, 0, (item(0, 5),), ((0,),)), 2)[1].command
    assert (empty.items, empty.num_mini_batches, empty.num_trajectories) == ((), 1, (1,))
