"""Advantages of a group: the worked example, every switch, and properties that no input may break."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.algo.advantage import (
    GroupAdvantages,
    ScoredTrajectory,
    exclusion_reason,
    filter_groups,
    memory_metrics,
    mini_batches,
    step_advantages,
)
from mempo_ray.algo.memory_reward import MemorySample
from mempo_ray.config.schema import Algorithm, GroupFilter, MemoryReward
from mempo_ray.contracts import EndReason, Scored, TrajectorySummary, Unscored

GRPO, MEMORY = Algorithm(), MemoryReward()


def sample(turn: int, reward: float) -> MemorySample:
    return MemorySample(turn, reward, p_mem=0.5, p_base=0.5 - reward, weight_version=3, scorer_version=3)


def trajectory(outcome: float, *rewards: float | None, format_valid: bool = True) -> ScoredTrajectory:
    """One turn per reward; None: no sample there."""
    samples = tuple(sample(turn, reward) for turn, reward in enumerate(rewards) if reward is not None)
    return ScoredTrajectory(outcome, len(rewards), format_valid, samples)


def group_advantages(group: Sequence[ScoredTrajectory], algorithm: Algorithm, memory: MemoryReward) -> GroupAdvantages:
    """Of a step with one group."""
    return step_advantages([group], algorithm, memory)[0]


EXAMPLE = (trajectory(1, 0.2, 0.6), trajectory(0, -0.1))


def test_worked_example_of_section_4():
    result = group_advantages(EXAMPLE, GRPO, MEMORY)
    assert result.outcome_GS[0] == pytest.approx([0.707106] * 2, abs=1e-6)
    assert result.outcome_GS[1] == pytest.approx([-0.707106], abs=1e-6)
    assert result.memory_GS[0] == pytest.approx([-0.094916, 1.044071], abs=1e-6)
    assert result.memory_GS[1] == pytest.approx([-0.949155], abs=1e-6)
    assert result.outcome_GS[0][1] + result.memory_GS[0][1] == pytest.approx(1.751177, abs=1e-6)
    assert result.outcome_GS[1][0] + result.memory_GS[1][0] == pytest.approx(-1.656261, abs=1e-6)


def test_kl_penalty_moves_the_score_but_neither_gate_nor_memory():
    group = (replace(EXAMPLE[0], penalty=1.5), EXAMPLE[1])
    settings = MemoryReward(gate="success_only")
    result = group_advantages(group, GRPO, settings)
    assert result.outcome_GS[0][0] < 0 < result.outcome_GS[1][0]
    assert result.memory_GS == group_advantages(EXAMPLE, GRPO, settings).memory_GS != ((0.0, 0.0), (0.0,))


# -- memory -----------------------------------------------------------------------------------------------


def test_pools_by_turn_index_and_by_trajectory_have_their_own_statistics():
    group = (trajectory(1, 0.2, 0.6), trajectory(0, -0.1, 0.0))
    by_turn = group_advantages(group, GRPO, MemoryReward(pool="turn_index"))
    assert by_turn.num_pools == 2
    assert by_turn.memory_GS[0] == pytest.approx((0.70710, 0.70710), abs=1e-4)
    by_trajectory = group_advantages(group, GRPO, MemoryReward(pool="trajectory"))
    assert by_trajectory.memory_GS[0] == pytest.approx((-0.70710, 0.70710), abs=1e-4)


def test_gate_removes_samples_before_the_statistics():
    group = (trajectory(1, 0.2, 0.6), trajectory(0, -5.0), trajectory(0, 0.4, format_valid=False))
    success = group_advantages(group, GRPO, MemoryReward(gate="success_only"))
    assert success.memory_GS == (pytest.approx((-0.70710, 0.70710), abs=1e-4), (0.0,), (0.0,))
    assert success.num_gated == 2
    formatted = group_advantages(group, GRPO, MemoryReward(gate="format_ok"))
    assert formatted.memory_GS[2] == (0.0,)
    assert formatted.num_gated == 1


def test_combine_acts_after_the_statistics():
    everything = group_advantages(EXAMPLE, GRPO, MEMORY).memory_GS
    success = group_advantages(EXAMPLE, Algorithm(combine="success_only"), MEMORY).memory_GS
    assert success == (everything[0], (0.0,))
    positive = group_advantages(EXAMPLE, Algorithm(combine="positive_only"), MEMORY).memory_GS
    assert positive == ((0.0, everything[0][1]), (0.0,))


def test_weight_multiplies_the_memory_advantage():
    once = group_advantages(EXAMPLE, GRPO, MEMORY).memory_GS
    half = group_advantages(EXAMPLE, GRPO, MemoryReward(weight=0.5)).memory_GS
    assert half[0] == pytest.approx([a / 2 for a in once[0]])


def test_a_turn_without_a_sample_has_no_memory_advantage():
    result = group_advantages((trajectory(1, None, 0.6), trajectory(0, -0.1)), GRPO, MEMORY)
    assert result.memory_GS[0][0] == 0.0 != result.memory_GS[0][1]


def test_a_pool_of_one_is_flat():
    result = group_advantages((trajectory(1, 0.3), trajectory(0, None)), GRPO, MEMORY)
    assert (result.memory_GS, result.num_pools, result.num_flat_pools) == (((0.0,), (0.0,)), 1, 1)


def test_kernel_noise_between_equal_memories_is_flat_and_not_an_advantage():
    group = (trajectory(1, 0.3), trajectory(0, 0.3 + 2e-6))
    assert group_advantages(group, GRPO, MEMORY).is_memory_flat
    noisy = group_advantages(group, GRPO, MemoryReward(min_std=0))
    assert abs(noisy.memory_GS[0][0]) > 0.4  # what min_std is there for


turn_rewards = st.lists(st.one_of(st.none(), st.floats(-1, 1)), min_size=1, max_size=4)
groups = st.lists(
    st.builds(
        lambda outcome, rewards, valid: trajectory(outcome, *rewards, format_valid=valid),
        st.sampled_from([0.0, 0.5, 1.0]),
        turn_rewards,
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
memory_settings = st.builds(
    MemoryReward,
    pool=st.sampled_from(["group_turns", "turn_index", "trajectory"]),
    gate=st.sampled_from(["always", "success_only", "format_ok"]),
)
algorithms = st.builds(
    Algorithm,
    combine=st.sampled_from(["add", "success_only", "positive_only"]),
    adv_estimator=st.sampled_from(["grpo", "rloo"]),
    normalize_by_std=st.booleans(),
)


@given(groups, algorithms, memory_settings, st.randoms())
def test_order_of_siblings_does_not_matter(group, algorithm, memory, random):
    order = list(range(len(group)))
    random.shuffle(order)
    straight = group_advantages(group, algorithm, memory)
    shuffled = group_advantages([group[i] for i in order], algorithm, memory)
    assert shuffled.num_flat_pools == straight.num_flat_pools
    for i, origin in enumerate(order):
        assert shuffled.outcome_GS[i] == pytest.approx(straight.outcome_GS[origin], abs=1e-6)
        assert shuffled.memory_GS[i] == pytest.approx(straight.memory_GS[origin], abs=1e-6)


@given(groups, st.floats(-1, 1), algorithms, memory_settings)
def test_equal_memories_have_exactly_no_advantage(group, reward, algorithm, memory):
    equal = [replace(t, samples=tuple(replace(s, reward=reward) for s in t.samples)) for t in group]
    result = group_advantages(equal, algorithm, memory)
    assert all(a == 0.0 for row in result.memory_GS for a in row)
    assert result.is_memory_flat


@given(groups)
def test_a_pool_that_is_not_flat_has_mean_0_and_deviation_1(group):
    result = group_advantages(group, GRPO, MEMORY)
    advantages = [entry.advantage for entry in result.pooled]
    if not result.is_memory_flat:
        assert np.mean(advantages) == pytest.approx(0, abs=1e-9)
        assert np.std(advantages, ddof=1) == pytest.approx(1, rel=2e-2)  # the epsilon, at std = min_std


def test_metrics_by_turn_count_from_one():
    metrics = memory_metrics([group_advantages(EXAMPLE, GRPO, MEMORY)])
    assert metrics["memory/reward"] == pytest.approx(0.7 / 3)
    assert metrics["memory/advantage_turn_2"] == pytest.approx(1.044071, abs=1e-6)
    assert metrics["memory/num_samples"] == 3
    assert metrics["memory/version_gap"] == 0
    assert memory_metrics([]) == {}


# -- who counts -------------------------------------------------------------------------------------------


def summary(end_reason=EndReason.ANSWERED, output_tokens=(5,)) -> TrajectorySummary:
    ones = (1,) * len(output_tokens)
    return TrajectorySummary("q", 0, 0, end_reason, "why", True, ones, output_tokens, ones, ones, ones, ())


def test_infrastructure_unscored_and_empty_trajectories_are_excluded_with_a_reason():
    assert exclusion_reason(summary(), Scored(0.0)) is None
    assert exclusion_reason(summary(EndReason.MAX_TURNS), Scored(0.0)) is None
    assert exclusion_reason(summary(EndReason.ENGINE_FAILED), None) == "engine_failed: why"
    assert exclusion_reason(summary(), Unscored("slow", "timeout")) == "unscored: timeout: slow"
    assert exclusion_reason(summary(output_tokens=(0,)), Scored(1.0)) == "no output tokens"
    assert exclusion_reason(summary(), Scored(float("nan"))) == "unscored: the scorer answered nan"


def test_a_reward_on_a_row_with_an_empty_mask_does_not_touch_its_sibling():
    """verl gives the sibling −0.7071 (facts.md, known faults)."""
    scored = [(summary(), Scored(0.0)), (summary(output_tokens=(0,)), Scored(1.0))]
    survivors = [ScoredTrajectory(s.score, 1, True) for t, s in scored if exclusion_reason(t, s) is None]
    assert group_advantages(survivors, GRPO, MEMORY).outcome_GS == ((0.0,),)


def test_a_step_without_survivors_has_nothing_to_give():
    assert step_advantages([], GRPO, MEMORY) == []


# -- between groups ---------------------------------------------------------------------------------------


def test_only_groups_flat_in_outcome_and_memory_are_filtered():
    flat = group_advantages((trajectory(1, 0.1), trajectory(1, 0.1)), GRPO, MEMORY)
    outcome_only = group_advantages((trajectory(1, 0.1), trajectory(0, 0.1)), GRPO, MEMORY)
    memory_only = group_advantages((trajectory(1, 0.1), trajectory(1, 0.9)), GRPO, MEMORY)
    found = (flat, outcome_only, memory_only)
    assert filter_groups(found, GroupFilter(), num_wanted=3).kept == (0, 1, 2)
    dropped = filter_groups(found, GroupFilter(mode="drop"), num_wanted=3)
    assert (dropped.kept, dropped.num_resample) == ((1, 2), 0)
    assert filter_groups(found, GroupFilter(mode="resample", max_resamples=2), num_wanted=3, round_=1).num_resample == 1
    assert filter_groups(found, GroupFilter(mode="resample", max_resamples=2), num_wanted=3, round_=2).num_resample == 0


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 8), st.integers(0, 99))
def test_mini_batches_are_exactly_as_many_as_asked_and_hold_each_group_once(tokens, num_parts, seed):
    parts = mini_batches(tokens, num_parts, seed)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(tokens)))
    assert sum(1 for part in parts if part) == min(num_parts, len(tokens))
    assert parts == mini_batches(tokens, num_parts, seed)


@given(st.integers(2, 6), st.integers(1, 10), st.integers(0, 99))
def test_mini_batches_of_equal_groups_are_equal(num_parts, each, seed):
    assert {len(part) for part in mini_batches([100] * num_parts * each, num_parts, seed)} == {each}


@given(st.lists(st.integers(1, 100), min_size=16, max_size=40), st.integers(1, 4), st.integers(0, 99))
def test_mini_batches_differ_by_at_most_two_groups(tokens, num_parts, seed):
    sums = [sum(tokens[i] for i in part) for part in mini_batches(tokens, num_parts, seed)]
    assert max(abs(s - sum(tokens) / num_parts) for s in sums) <= max(tokens) * 2


def test_more_turns_never_mean_more_steps():
    assert len(mini_batches([100] * 8, 2, 0)) == len(mini_batches([1600] * 8, 2, 0)) == 2
