"""Figures of a reference implementation (algorithm.md §6): a row there is a trajectory, values are float32.

The file is named by $MEMPO_GOLDENS, so other values can be put under the same tests.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mempo_ray.algo.estimators import ScoredTrajectory, gae
from mempo_ray.algo.kl import kl_estimate
from mempo_ray.algo.policy_loss import surrogate, token_weights
from mempo_ray.algo.registry import ADV_ESTIMATORS
from mempo_ray.config.schema import Algorithm, Reward
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.registry import SCORERS
from mempo_ray.rewards.scorers.overlong import overlong_penalty
from mempo_ray.rewards.scorers.text import last_answer

SHARED = Path(os.environ.get("MEMPO_SHARED", Path(__file__).parents[2] / "../shared"))
PATH = Path(os.environ.get("MEMPO_GOLDENS", SHARED / "goldens/algorithms.json"))
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "trajectory_sum",
    "seq-mean-token-mean": "trajectory_mean",
    "seq-mean-token-sum-norm": "trajectory_sum_norm",
}


def cases(section: str) -> list:
    """Parameters of one section; a single skipped one where the file is absent."""
    if not PATH.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no goldens at {PATH}; set $MEMPO_GOLDENS"))]
    return [pytest.param(case, id=f"{section}{i}") for i, case in enumerate(json.loads(PATH.read_text())[section])]


def near(expected) -> object:
    return pytest.approx(np.array(expected), rel=2e-4, abs=2e-7)


def by_group(case: dict, settings: Algorithm) -> np.ndarray:
    scores = np.array(case["scores"], np.float32).astype(np.float64)
    names = list(dict.fromkeys(case["groups"]))
    members = [[i for i, group in enumerate(case["groups"]) if group == name] for name in names]
    groups = [[ScoredTrajectory(scores[i], 1, True) for i in indices] for indices in members]
    found = ADV_ESTIMATORS.get(settings.adv_estimator)(groups, settings)
    advantages = np.zeros(len(scores))
    for indices, group in zip(members, found, strict=True):
        advantages[indices] = np.concatenate(group)
    return advantages


@pytest.mark.parametrize("case", cases("grpo"))
def test_grpo(case):
    settings = Algorithm(normalize_by_std=case["normalize_by_std"], singleton="raw")
    assert by_group(case, settings) == near(case["advantages"])


@pytest.mark.parametrize("case", cases("rloo"))
def test_rloo(case):
    assert by_group(case, Algorithm(adv_estimator="rloo", singleton="raw")) == near(case["advantages"])


@pytest.mark.parametrize("case", cases("gae"))
def test_gae(case):
    rewards, values, mask = (np.array(case[k]) for k in ("token_level_rewards", "values", "response_mask"))
    advantages, returns = gae(rewards, values, mask, gamma=case["gamma"], lam=case["lam"])
    assert advantages == pytest.approx(np.array(case["advantages_masked"]), rel=2e-4, abs=2e-6)
    assert returns == near(case["returns_masked"])


@pytest.mark.parametrize("case", cases("policy_loss"))
def test_policy_loss(case):
    logp, old, advantages, mask = (
        torch.tensor(case[k]) for k in ("log_prob", "old_log_prob", "advantages", "response_mask")
    )
    found = surrogate(
        logp,
        old,
        advantages,
        clip_low=case["clip_ratio_low"],
        clip_high=case["clip_ratio_high"],
        dual_clip=case["clip_ratio_c"],
    )
    for theirs, ours in AGGREGATIONS.items():
        weights = token_weights(
            mask,
            mask.sum(1, keepdim=True),
            aggregation=ours,
            num_trajectories=len(mask),
            num_tokens=int(mask.sum()),
            norm_length=mask.shape[1],
        )
        assert (weights * found.loss).sum().item() == near(case["loss"][theirs]), theirs
    per_token = mask / mask.sum()
    metrics = {
        "actor/pg_clipfrac": found.is_clipped,
        "actor/pg_clipfrac_lower": found.is_dual_clipped,
        "actor/ppo_kl": kl_estimate(old, logp, estimator="k1"),
    }
    assert {name: (per_token * values).sum().item() for name, values in metrics.items()} == pytest.approx(
        case["metrics"], rel=2e-4
    )


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("case", cases("kl"))
def test_kl(case, estimator):
    found = kl_estimate(torch.tensor(case["log_prob"]), torch.tensor(case["ref_log_prob"]), estimator=estimator)
    assert found.numpy() == pytest.approx(np.array(case[estimator]), rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("case", cases("em"))
def test_exact_and_substring_match(case):
    response = Response("nq", (tuple(case["targets"]),), (case["text"],), answer=last_answer(case["text"]))
    exact, substring = (SCORERS.get(name).load()(response, Reward()) for name in ("exact_match", "substring_match"))
    assert (exact.score, substring.score) == (case["score"], case["substring_score"])


@pytest.mark.parametrize("case", cases("overlong"))
def test_overlong_penalty(case):
    penalty = overlong_penalty(
        case["response_length"],
        max_response_tokens=case["max_response_length"],
        buffer_tokens=case["overlong_buffer_length"],
        penalty_factor=case["penalty_factor"],
    )
    assert penalty == near(case["penalty"])
