"""Outcome advantages: a worked example of each estimator, and what no input may break."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.algo.estimators import Groups, ScoredTrajectory, gae, per_group
from mempo_ray.algo.registry import ADV_ESTIMATORS
from mempo_ray.config.schema import Algorithm
from mempo_ray.errors import ConfigError, TrainingError

PER_GROUP = ("grpo", "dr_grpo", "rloo", "opo")
WEIGHTS = {"em": 0.7, "judge": 0.2, "logged": 0.0}
ALL = (*PER_GROUP, "gdpo", "reinforce++", "gae")


def scored(score: float, num_turns: int = 1, **others) -> ScoredTrajectory:
    return ScoredTrajectory(score, num_turns, True, **others)


def estimate(name: str, groups: Groups, **settings) -> list[list[list[float]]]:
    algorithm = Algorithm(adv_estimator=name, **settings)
    return [[a_S.tolist() for a_S in group] for group in ADV_ESTIMATORS.get(name)(groups, algorithm)]


def test_every_shipped_estimator_is_tested_here():
    assert set(ALL) == set(ADV_ESTIMATORS.names)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1.0])
def test_equal_scores_give_exactly_zero(name, score):
    group = [scored(score, parts={"em": score}, num_tokens=i + 1) for i in range(7)]
    assert estimate(name, [group, group]) == [[[0.0]] * 7] * 2


@pytest.mark.parametrize("name", PER_GROUP)
def test_a_group_of_one_gives_zero_or_its_own_score(name):
    assert estimate(name, [[scored(0.7)]]) == [[[0.0]]]
    assert estimate(name, [[scored(0.7)]], singleton="raw") == [[[0.7]]]


@pytest.mark.parametrize("name", ALL)
def test_a_better_trajectory_has_the_larger_advantage_in_each_turn(name):
    group = [scored(1.0, 2, parts={"em": 1.0}), scored(0.0, 2, parts={"em": 0.0})]
    [[good_S, bad_S]] = estimate(name, [group])
    assert all(good > 0 > bad for good, bad in zip(good_S, bad_S, strict=True))


def test_without_std_the_advantage_is_the_centred_score():
    group = [scored(1.0), scored(0.0)]
    assert estimate("grpo", [group], normalize_by_std=False) == [[[0.5], [-0.5]]]
    assert estimate("dr_grpo", [group]) == [[[0.5], [-0.5]]]


def test_opo_weighs_the_baseline_by_length():
    """(30 · 1 + 10 · 0) / 40 = 0.75."""
    group = [scored(1.0, num_tokens=30), scored(0.0, num_tokens=10)]
    assert estimate("opo", [group]) == [[[0.25], [-0.75]]]


def test_gdpo_gives_a_small_part_the_same_say_as_a_large_one():
    """Sums 10.1 and 10.0 would hide `format`; normalised apart the two parts cancel out."""
    group = [scored(0, parts={"em": 10.0, "format": 0.0}), scored(0, parts={"em": 0.0, "format": 0.1})]
    assert not np.any(estimate("gdpo", [group]))


def test_gdpo_weighs_the_parts_once_they_are_normalised():
    """em (1.1547, −0.5774, −0.5774) and judge (−0.8321, −0.2774, 1.1094), each of deviation 1; 0.7 · em + 0.2 · judge =
    (0.6419, −0.4596, −0.1823), of deviation 0.5729."""
    parts = [{"em": 1.0, "judge": 20.0}, {"em": 0.0, "judge": 40.0}, {"em": 0.0, "judge": 90.0}]
    group = [scored(0, parts=p | {"logged": i}, part_weights=WEIGHTS) for i, p in enumerate(parts)]
    np.testing.assert_allclose(estimate("gdpo", [group]), [[[1.120363], [-0.802231], [-0.318133]]], atol=2e-5)


def test_under_gdpo_a_flat_group_stays_flat_and_a_part_that_a_group_lacks_moves_nothing():
    flat = [scored(0, parts={"em": 1.0, "judge": 0.3})] * 3
    lacking = [scored(0, parts={"em": em}) for em in (0.1, 0.2, 0.4)]
    both = [scored(0, parts={"em": em, "judge": em / 7}) for em in (0.1, 0.2, 0.4)]
    zeros, one, two = estimate("gdpo", [flat, lacking, both])
    assert zeros == [[0.0]] * 3
    np.testing.assert_allclose(two, 2 * np.array(one), rtol=1e-4)


def test_gdpo_without_parts_says_what_makes_them():
    with pytest.raises(TrainingError, match=r"reward\.manager=hybrid"):
        estimate("gdpo", [[scored(1.0), scored(0.0)]])


def test_reinforce_plus_plus_normalises_over_the_step_not_the_group():
    """Both groups are flat in themselves: GRPO sees nothing, the step does."""
    groups = [[scored(1.0), scored(1.0)], [scored(0.0), scored(0.0)]]
    assert np.ravel(estimate("reinforce++", groups)) == pytest.approx([0.866025] * 2 + [-0.866025] * 2, abs=1e-6)
    assert not np.any(estimate("grpo", groups))


def test_a_discount_makes_early_turns_count_less():
    [[good_S, _]] = estimate("reinforce++", [[scored(1.0, 3), scored(-1.0, 3)]], gamma=0.5)
    assert good_S[0] < good_S[1] < good_S[2]


def test_process_scores_move_the_turns_before_and_of_them():
    """Returns with γ = λ = 1: 1.5, 1, 1 against 0, 0, 0."""
    group = [scored(1.0, 3, process_S=(0.5, 0.0, 0.0)), scored(0.0, 3)]
    [[a_S, b_S]] = estimate("gae", [group])
    assert a_S[0] > a_S[1] == a_S[2] > 0 > b_S[0] == b_S[2]


def test_gae_lambda_shortens_the_sight_of_a_turn():
    [[a_S, _]] = estimate("gae", [[scored(1.0, 3), scored(0.0, 3)]], gae_lambda=0.1)
    assert a_S[0] < a_S[2]


def test_gae_skips_masked_tokens():
    rewards, values = np.array([[0.0, 9.0, 1.0]]), np.array([[0.1, 5.0, 0.2]])
    dense = gae(rewards[:, [0, 2]], values[:, [0, 2]], np.ones((1, 2)), gamma=0.9, lam=0.8)
    masked = gae(rewards, values, np.array([[1, 0, 1]]), gamma=0.9, lam=0.8)
    for a, b in zip(masked, dense, strict=True):
        assert a[:, [0, 2]] == pytest.approx(b)
        assert a[0, 1] == 0


def test_a_function_of_scores_becomes_an_estimator():
    @per_group
    def best_of(scores_G, settings):
        return (scores_G == scores_G.max()).astype(float)

    assert [[a_S.tolist() for a_S in g] for g in best_of([[scored(0.1), scored(0.4, 2)]], Algorithm())] == [
        [[0.0], [1.0, 1.0]]
    ]


def test_an_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"adv_estimator: unknown name 'gpro'; did you mean 'grpo'.*known: .*grpo, "):
        ADV_ESTIMATORS.get("gpro")


trajectories = st.builds(
    lambda score, turns, tokens: scored(score, turns, num_tokens=tokens, parts={"em": score}),
    st.floats(-1, 1),
    st.integers(1, 4),
    st.integers(1, 100),
)


@given(st.lists(st.lists(trajectories, min_size=1, max_size=5), min_size=1, max_size=4), st.sampled_from(ALL))
def test_every_turn_gets_a_finite_advantage(groups, name):
    found = estimate(name, groups)
    assert [[len(a_S) for a_S in group] for group in found] == [[t.num_turns for t in group] for group in groups]
    assert np.isfinite(np.concatenate([a_S for group in found for a_S in group])).all()
