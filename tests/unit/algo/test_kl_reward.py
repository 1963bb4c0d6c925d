"""KL as part of the reward: what is asked for, the penalty, the adaptive coefficient."""

import numpy as np
import pytest

from mempo_ray.algo.kl_reward import kl_request, next_kl_coef, token_kl
from mempo_ray.config.schema import AdaptiveKL
from mempo_ray.contracts import EndReason, LogProbResult, PayloadRef, TrajectorySummary
from mempo_ray.errors import TrainingError


def result(*rows) -> LogProbResult:
    return LogProbResult("kl", 0, tuple(np.array(row, np.float32) for row in rows))


def test_every_output_token_is_asked_behind_its_own_prompt():
    summary = TrajectorySummary("q", 1, 0, EndReason.ANSWERED, "", True, (10, 20), (3, 4), (5, 0), (2, 2), (0, 0), ())
    request = kl_request(
        summary, PayloadRef("p", None), model="reference", policy_version=None, temperature=0.7, deadline_s=9
    )
    assert [request.path(i) for i in request.marked] == [(0, 1), (2, 3)]
    assert [request.segments[i].targets for i in request.marked] == [(0, 3), (0, 4)]
    assert request.num_plain_tokens == 10 + 3 + 20 + 4
    assert (request.model, request.temperature) == ("reference", 0.7)


def test_every_output_token_has_its_kl():
    assert token_kl(result([-1, -2], [-3]), result([-1.5, -2], [-2])).tolist() == [0.5, 0, -1]


def test_answers_of_another_shape_or_not_finite_end_the_run():
    with pytest.raises(TrainingError):
        token_kl(result([-1, -2]), result([-1]))
    with pytest.raises(TrainingError):
        token_kl(result([-1]), result([np.inf]))


@pytest.mark.parametrize(("kl", "factor"), [(0.1, 1.0), (10.0, 1 + 0.2 * 64 / 1000), (0.0, 1 - 0.2 * 64 / 1000)])
def test_the_coefficient_rises_above_the_target_and_falls_below(kl, factor):
    settings = AdaptiveKL(target=0.1, horizon=1000)
    assert next_kl_coef(0.5, kl, 64, settings) == pytest.approx(0.5 * factor)
