"""The forest of a list of rows, its layout and its cuts: numpy only, against the definitions written out."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.training import forest
from mempo_ray.training.forest import Pass, plan_forest
from mempo_ray.training.rows import DUMMY, Row


def row(ids: list[int], *targets: int, temperature: float = 1.0) -> Row:
    """`targets`: positions; the last token alone unless given."""
    return Row(np.array(ids, np.int64), np.array(targets or (len(ids) - 1,), np.int64), temperature)


@st.composite
def random_rows(draw: st.DrawFn) -> list[Row]:
    """Few distinct ids and prefixes of each other, so that much is shared; long ones, one-token probes, duplicates."""
    stems = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4))
    rows = []
    for _ in range(draw(st.integers(1, 8))):
        stem = draw(st.sampled_from(stems))
        ids = stem[: draw(st.integers(0, len(stem)))] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        ids = ids if len(ids) > 1 else [*ids, 0]
        targets = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))
        rows.append(row(ids, *sorted(targets), temperature=draw(st.sampled_from([1.0, 0.7]))))
    return rows


def seen_by(one: Pass, token: int) -> np.ndarray:
    """The rule of the module: token i sees j ⇔ j ≤ i < ends[j]."""
    before = np.arange(token + 1)
    return before[token < one.ends_T[before]]


def needed(rows: list[Row]) -> list[tuple[int, ...]]:
    return [tuple(r.ids_T[: r.targets_K[-1]].tolist()) for r in rows]


@given(random_rows(), st.integers(1, 40), st.booleans())
def test_each_target_is_predicted_where_exactly_its_own_prefix_is_seen(rows, budget, share) -> None:
    plan = plan_forest(rows, budget, share=share)
    assert sorted(i for one in plan.passes for i in one.rows) == list(range(len(rows)))
    for one in plan.passes:
        slots = iter(zip(one.slots_K.tolist(), one.targets_K.tolist(), strict=True))
        for index, num in zip(one.rows, one.num_targets, strict=True):
            assert num == len(rows[index].targets_K)
            for position in rows[index].targets_K:
                slot, target = next(slots)
                seen = seen_by(one, one.predictors_U[slot])
                np.testing.assert_array_equal(one.ids_T[seen], rows[index].ids_T[:position])
                np.testing.assert_array_equal(one.depths_T[seen], np.arange(position))
                assert target == rows[index].ids_T[position]
                assert one.temperature_U[slot] == np.float32(rows[index].temperature)
        assert next(slots, None) is None


@given(random_rows(), st.integers(1, 40), st.booleans(), st.integers(1, 5))
def test_the_blocks_of_a_pass_see_what_the_rule_says(rows, budget, share, piece) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "PIECE_TOKENS", piece)
        plan = plan_forest(rows, budget, share=share)
    for one in plan.passes:
        assert [t for b in one.blocks for t in range(b.start, b.stop)] == list(range(one.num_tokens))
        for block in one.blocks:
            before = [t for start, stop in block.prefix for t in range(start, stop)]
            assert block.num_prefix == len(before)
            for token in range(block.start, block.stop):
                np.testing.assert_array_equal([*before, *range(block.start, token + 1)], seen_by(one, token))
            assert block.is_square or block.stop - block.start <= piece


@given(random_rows())
def test_what_fits_runs_every_distinct_prefix_once_and_not_the_last_targets(rows) -> None:
    plan = plan_forest(rows, 10_000)
    (one,) = plan.passes
    assert one.num_tokens == len({ids[: n + 1] for ids in needed(rows) for n in range(len(ids))})
    assert plan.num_plain_tokens == sum(map(len, needed(rows)))
    assert len(one.predictors_U) == len(set(zip(one.predictors_U, one.temperature_U, strict=True)))


@given(random_rows(), st.integers(1, 40))
def test_a_pass_keeps_the_budget_or_the_length_of_the_longest_row(rows, budget) -> None:
    limit = max(budget, *map(len, needed(rows)))
    assert all(one.num_tokens <= limit for one in plan_forest(rows, budget).passes)


@given(random_rows(), st.integers(8, 30))
def test_no_other_cut_of_the_sorted_rows_repeats_fewer_tokens(rows, budget) -> None:
    ids = sorted(needed(rows))
    common = [0] + [
        len(list(itertools.takewhile(lambda p: p[0] == p[1], zip(a, b, strict=False))))
        for a, b in itertools.pairwise(ids)
    ]
    limit = max(budget, *map(len, ids))

    def cost(cuts: tuple[int, ...]) -> float:
        total = 0
        for start, stop in itertools.pairwise((0, *cuts, len(ids))):
            tokens = len({i[: n + 1] for i in ids[start:stop] for n in range(len(i))})
            total += tokens + forest.PASS_TOKENS if tokens <= limit else float("inf")
        return total

    every = itertools.chain.from_iterable(itertools.combinations(range(1, len(ids)), n) for n in range(len(ids)))
    found = forest._cut(np.array([len(i) for i in ids]), np.array(common), budget)
    assert cost(tuple(start for start, _ in found[1:])) == min(cost(cuts) for cuts in every)


def test_the_worked_case_of_the_module() -> None:
    (one,) = plan_forest([row([5, 6, 7, 8]), row([5, 6, 9]), row([5, 6, 7, 3])], 100).passes
    assert one.ids_T.tolist() == [5, 6, 7]
    assert one.predictors_U.tolist() == [1, 2]
    assert one.rows == (1, 0, 2)  # sorted by what is run, then as given
    assert one.targets_K.tolist() == [9, 8, 3]
    assert one.slots_K.tolist() == [0, 1, 1]


def test_the_worked_case_of_the_scoring_page() -> None:
    """docs/scoring.md: two turns with a memory each, P_full and P_mem of both, as ids."""
    question, output, found, probe = [1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13]
    contexts = [question, question + output + found, [*question, 4, 5], [*question, 4, 6]]
    plan = plan_forest([row(c + probe, len(c) + 1, len(c) + 2) for c in contexts], 100)
    (one,) = plan.passes
    assert (plan.num_plain_tokens, plan.num_tokens) == (30, 18)
    assert one.ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 10, 11, 6, 10, 11, 10, 11]
    assert one.depths_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 5, 6, 4, 5, 6, 3, 4]
    assert one.ends_T.tolist() == [18, 18, 18, 16, 13, 11, 11, 11, 11, 11, 11, 13, 13, 16, 16, 16, 18, 18]
    assert [(b.start, b.stop, b.prefix) for b in one.blocks] == [
        (0, 11, ()),
        (11, 13, ((0, 5),)),
        (13, 16, ((0, 4),)),
        (16, 18, ((0, 3),)),
    ]


def test_a_history_with_a_probe_behind_each_turn_is_one_causal_trunk_and_its_branches() -> None:
    history = list(range(100, 130))
    rows = [row([*history[:stop], 1, 2, 3]) for stop in (10, 20, 30)]
    plan = plan_forest(rows, 1000)
    (one,) = plan.passes
    assert plan.num_trunks == 1
    assert plan.num_tokens == 30 + 3 * 2
    trunk, *branches = one.blocks
    assert (trunk.start, trunk.stop, trunk.prefix) == (0, 32, ())  # the longest probe stands at the trunk's end
    assert [b.prefix for b in branches] == [((0, 20),), ((0, 10),)]


def test_a_history_that_does_not_continue_the_other_is_a_trunk_of_its_own_and_counted() -> None:
    continued = [row([*range(100, 100 + n), 1]) for n in (10, 20)] + [row([*range(100, 100 + n), 2]) for n in (10, 20)]
    truncated = [row([*range(105, 100 + n), 1]) for n in (10, 20)] + [
        row([*range(105, 100 + n), 9, 2]) for n in (10, 20)
    ]
    assert plan_forest(continued, 1000).num_trunks == 0  # one-token probes need no token of their own
    assert plan_forest(continued + truncated, 1000).num_trunks == 1
    assert plan_forest(truncated, 1000).num_trunks == 1


def test_equal_rows_are_one_row_even_where_the_budget_is_spent() -> None:
    rows = [row([1, 2, 3, 4])] * 50
    (one,) = plan_forest(rows, 3).passes
    assert one.num_tokens == 3
    assert set(one.slots_K.tolist()) == {0}
    assert len(one.predictors_U) == 1


def test_rows_that_share_nothing_keep_their_order_and_are_packed_to_the_budget() -> None:
    rows = [row([i] * n) for i, n in enumerate((5, 4, 6, 10, 2))]
    plan = plan_forest(rows, 8, share=False)
    assert [i for one in plan.passes for i in one.rows] == [0, 1, 2, 3, 4]
    assert [one.num_tokens for one in plan.passes] == [4, 8, 9, 1]  # 9: the longest row lifts the budget


def test_nothing_and_the_dummy_row_can_be_planned() -> None:
    assert plan_forest([], 10).passes == ()
    (one,) = plan_forest([DUMMY], 1).passes
    assert one.num_tokens == len(one.predictors_U) == 1


def test_the_plan_costs_python_work_by_row_and_not_by_token() -> None:
    """Calls of functions, Python's and numpy's, for 16 rows whose turns are 100 times as long."""

    def num_calls(turn: int) -> int:
        history = np.random.default_rng(0).integers(0, 1000, 16 * turn)
        rows = [row([*history[: t * turn].tolist(), *range(20)]) for t in range(1, 17)]
        events = []
        sys.setprofile(lambda _frame, event, _argument: events.append(event))
        try:
            plan_forest(rows, 10**6)
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in events)

    assert num_calls(5000) < 1.1 * num_calls(50) < 16 * 150  # a collection of garbage may add a few
