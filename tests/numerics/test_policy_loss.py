"""The loss per token, and its sum over any split into micro-batches and ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_ray.algo.correction import correction_weight
from mempo_ray.algo.kl import kl_estimate
from mempo_ray.algo.policy_loss import Tokens, entropy, surrogate, token_weights
from mempo_ray.algo.registry import POLICY_LOSSES
from mempo_ray.config.schema import Algorithm

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}


def loss_at(ratio: float, advantage: float):
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = surrogate(logp, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), **CLIP)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logp)
    return found, found.loss.item(), gradient.item()


def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient():
    for advantage in (-2.0, 0.5):
        _, loss, gradient = loss_at(1.0, advantage)
        assert (loss, gradient) == (-advantage, -advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "dual"),
    [
        (1.5, 1.0, -1.3, True, False),  # good token already likelier: held at 1 + clip_high
        (0.5, 1.0, -0.5, False, False),
        (0.5, -1.0, 0.8, True, False),  # bad token already rarer: held at 1 − clip_low
        (1.5, -1.0, 1.5, False, False),
        (9.0, -1.0, 3.0, False, True),  # bad token far likelier: the dual clip bounds the loss
        (9.0, 0.0, 0.0, False, False),
    ],
)
def test_each_branch_of_the_clip(ratio, advantage, loss, clipped, dual):
    found, value, gradient = loss_at(ratio, advantage)
    assert value == pytest.approx(loss)
    assert (found.is_clipped.item(), found.is_dual_clipped.item()) == (clipped, dual)
    assert (gradient == 0) == (clipped or dual or advantage == 0)


def test_an_extreme_ratio_stays_finite():
    found = surrogate(torch.tensor([500.0]), torch.tensor([-500.0]), torch.tensor([1.0]), **CLIP)
    assert torch.isfinite(found.loss).all()


# -- the other losses -------------------------------------------------------------------------------------

LOSSES = ("cispo", "clip_cov", "gpg", "gspo", "ppo_clip", "sapo")


def tokens(log_ratio, advantages, rows, logp=-1.0) -> Tokens:
    """float64; `logp` is the policy's log-prob of every token, or one of each."""
    new = (torch.zeros(len(rows), dtype=torch.float64) + torch.tensor(logp)).requires_grad_()
    old = new.detach() - torch.tensor(log_ratio, dtype=torch.float64)
    return Tokens(new, old, torch.tensor(advantages, dtype=torch.float64), torch.tensor(rows))


def gradient_of(name: str, given: Tokens, **settings) -> list[float]:
    found = POLICY_LOSSES.get(name)(given, Algorithm(policy_loss=name, **settings))
    return torch.autograd.grad(found.loss.sum(), given.logp)[0].tolist()


def test_every_shipped_loss_is_tested_here():
    assert set(POLICY_LOSSES.names) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_starts_as_the_plain_policy_gradient(name):
    """Old = new: the gradient is −A. The covariances here are below `clip_cov.low`."""
    given = tokens([0.0] * 3, [0.5, -2.0, 0.5], [0, 0, 1])
    assert gradient_of(name, given) == pytest.approx([-0.5, 2.0, -0.5])


def test_gspo_clips_a_turn_as_a_whole():
    """Turn 0 has mean log ratio 0.05: outside 1.04, so both of its tokens are held, even the one that moved back."""
    given = tokens([0.2, -0.1, 0.01], [1.0, 1.0, 1.0], [0, 0, 1])
    assert gradient_of("gspo", given, clip_low=0.04, clip_high=0.04) == pytest.approx([0, 0, -math.exp(0.01)])
    assert gradient_of("gspo", given, clip_low=0.2, clip_high=0.2)[:2] == pytest.approx([-math.exp(0.05)] * 2)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    given = tokens([math.log(1.5), math.log(0.5)], [1.0, -1.0], [0, 0])
    assert gradient_of("cispo", given, clip_low=0.2, clip_high=0.3) == pytest.approx([-1.3, 0.8])
    assert gradient_of("ppo_clip", given, clip_low=0.2, clip_high=0.3) == [0, 0]


def test_sapo_fades_where_ppo_cuts():
    """d/dr of 4/τ σ(τ(r−1)) is 4 σ(1−σ): at r = 3, τ = 1, 0.42 of the gradient is left, at r = 1 all."""
    [gradient] = gradient_of("sapo", tokens([math.log(3)], [1.0], [0]))
    sigma = 1 / (1 + math.exp(-2.0))
    assert gradient == pytest.approx(-3 * 4 * sigma * (1 - sigma))
    [steep] = gradient_of("sapo", tokens([math.log(3)], [-1.0], [0]), sapo={"tau_negative": 2.0})
    assert steep < -gradient


def test_gpg_ignores_the_ratio():
    assert gradient_of("gpg", tokens([3.0, -3.0], [1.0, -0.5], [0, 0])) == [-1.0, 0.5]


def test_clip_cov_silences_the_token_of_the_largest_covariance():
    """Covariances 2.5·1.5 = 3.75, then 0.25 and below; the bounds are 1 and 5."""
    given = tokens([0.0] * 4, [2.0, 0.0, 0.0, 0.0], [0] * 4, logp=[0.0, -3.0, -3.5, -3.5])
    assert gradient_of("clip_cov", given) == [0, 0, 0, 0]
    assert gradient_of("clip_cov", given, clip_cov={"low": 4.0}) == [-2.0, 0, 0, 0]


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name):
    assert all(map(math.isfinite, gradient_of(name, tokens([500.0, -500.0], [1.0, -1.0], [0, 1]))))


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"clip_cov"}))
def test_a_loss_is_the_same_whichever_rows_are_packed_together(name):
    whole = tokens([0.3, -0.2, 0.1, -0.4], [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1])
    halves = [tokens([0.3, -0.2], [1.0, 1.0], [0, 0]), tokens([0.1, -0.4], [-1.0, -1.0], [0, 0])]
    assert gradient_of(name, whole) == pytest.approx([g for half in halves for g in gradient_of(name, half)], abs=1e-12)


# -- aggregation ------------------------------------------------------------------------------------------


def test_trajectory_mean_weighs_a_trajectory_once_however_many_rows_it_has():
    """Trajectory 0 has two rows (2 and 1 tokens), trajectory 1 one row of 1 token; the last column is a tool token."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0]])
    weights = token_weights(
        mask, torch.tensor([[3], [3], [1]]), aggregation="trajectory_mean", num_trajectories=2, num_tokens=4
    )
    assert weights.flatten().tolist() == pytest.approx([1 / 6, 1 / 6, 0, 1 / 6, 0, 0, 1 / 2, 0, 0])


def test_a_row_with_an_empty_mask_has_no_weight_under_any_aggregation():
    for aggregation in ("trajectory_mean", "token_mean", "trajectory_sum", "trajectory_sum_norm"):
        weights = token_weights(
            torch.tensor([[1, 1], [0, 0]]),
            torch.tensor([[2], [0]]),
            aggregation=aggregation,
            num_trajectories=1,
            num_tokens=2,
            norm_length=2,
        )
        assert torch.isfinite(weights).all()
        assert weights[1].tolist() == [0, 0]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=10),
    aggregation=st.sampled_from(["trajectory_mean", "token_mean", "trajectory_sum", "trajectory_sum_norm"]),
    data=st.data(),
)
def test_the_gradient_does_not_depend_on_the_split(seed, owners, aggregation, data):
    """float64; rows of a trajectory may land in different micro-batches (§5: < 1e-6)."""
    generator = torch.Generator().manual_seed(seed)
    width, vocabulary, dim = 6, 7, 4
    owners = torch.tensor(owners)
    num_rows = len(owners)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    hidden, targets = uniform(num_rows, width, dim), torch.randint(vocabulary, (num_rows, width), generator=generator)
    old, reference, sampler = (-3 * uniform(num_rows, width) for _ in range(3))
    advantages = 4 * uniform(num_rows, width) - 2
    mask = (uniform(num_rows, width) < 0.7).double()
    tokens_by_owner = torch.zeros(4, dtype=torch.float64).index_add(0, owners, mask.sum(1))
    head = (uniform(dim, vocabulary) - 0.5).requires_grad_()

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        total = torch.zeros_like(head)
        for part in filter(None, parts):
            rows = torch.tensor(part)
            logits = hidden[rows] @ head
            logp = torch.log_softmax(logits, -1).gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1)
            weights = token_weights(
                mask[rows],
                tokens_by_owner[owners[rows]].unsqueeze(-1),
                aggregation=aggregation,
                num_trajectories=len(owners.unique()),
                num_tokens=int(mask.sum()),
                norm_length=5,
            )
            per_token = correction_weight(old[rows], sampler[rows], cap=2.0) * surrogate(
                logp, old[rows], advantages[rows], **CLIP
            ).loss + 0.1 * kl_estimate(logp, reference[rows], estimator="k3")
            total += torch.autograd.grad((weights * per_token).sum(), head)[0]
        return total

    places = data.draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    split = [[row for row in range(num_rows) if places[row] == part] for part in range(4)]
    assert torch.allclose(gradient(split), gradient([list(range(num_rows))]), rtol=0, atol=1e-10)


# -- the other terms --------------------------------------------------------------------------------------


def test_correction_is_one_where_sampler_and_policy_agree_and_is_capped():
    old = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    weight = correction_weight(old, torch.tensor([-1.0, -5.0, -2.0]), cap=2.0)
    assert weight.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])
    assert not weight.requires_grad


@given(st.floats(-5, 0), st.floats(-5, 0))
def test_kl_estimators_at_any_pair(logp, ref):
    k1, k2, k3, absolute = (
        kl_estimate(torch.tensor(logp), torch.tensor(ref), estimator=e).item() for e in ("k1", "k2", "k3", "abs")
    )
    assert absolute == abs(k1)
    assert min(k2, absolute) >= 0
    assert k3 >= -1e-5  # rounding at equality


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    """Their expectation under π, enumerated over the vocabulary, is KL(π ‖ π_ref) (while k3 stays under its clamp)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(2, 50, generator=generator, dtype=torch.float64)
    logp, ref = torch.log_softmax(logits, -1)
    expectation = (logp.exp() * kl_estimate(logp, ref, estimator=estimator)).sum()
    assert expectation.item() == pytest.approx((logp.exp() * (logp - ref)).sum().item())


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size():
    assert entropy(torch.zeros(2, 3, 8)).flatten().tolist() == pytest.approx([math.log(8)] * 6)
