"""EM, F1, token costs and the paired interval; ratios of the probes."""

from __future__ import annotations

import numpy as np
import pytest

from mempo_ray.contracts import LogProbRequest, LogProbResult, Probe
from mempo_ray.evaluation.metrics import aggregate, evaluated, paired_interval, token_costs
from mempo_ray.evaluation.probes import ProbeContexts, probe_ratios
from tests.fakes.trajectories import trajectory, turn


def test_em_and_f1_are_of_the_answer_alone_whatever_the_format_verdict():
    result = evaluated(trajectory("Paris, France", failed_checks=["mem_paired"]))
    assert (result.em, result.f1, result.format_valid) == (1.0, 1.0, False)


def test_a_partial_answer_has_f1_but_no_em():
    result = evaluated(trajectory("old Paris"))
    assert result.em == 0
    assert result.f1 == pytest.approx(2 / 3)  # precision 1/2, recall 1


def test_no_answer_scores_zero():
    result = evaluated(trajectory(None))
    assert (result.em, result.f1) == (0.0, 0.0)


def test_total_tokens_are_of_all_turns_and_peak_tokens_of_the_largest():
    summary = trajectory(turns=[turn(mask=(1,) * 5), turn(mask=(1,) * 7)]).summary()  # prompts of 3 tokens
    assert token_costs(summary) == (8 + 10, 10)
    assert token_costs(trajectory(turns=[]).summary()) == (0, 0)


def test_means_are_over_questions():
    values = aggregate([evaluated(trajectory("Paris")), evaluated(trajectory("Rome", failed_checks=["mem_paired"]))])
    assert values["eval/em"] == 0.5
    assert values["eval/format_valid_share"] == 0.5
    assert values["eval/total_tokens_mean"] == 5
    assert values["eval/num_questions"] == 2
    assert aggregate([]) == {"eval/num_questions": 0.0}


def test_the_interval_is_that_of_paired_differences():
    before, after = [0, 0, 1, 0], [1, 1, 1, 0]
    mean, low, high = paired_interval(before, after)
    half = 1.96 * np.std([1, 1, 0, 0], ddof=1) / 2
    assert (mean, low, high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))


def test_equal_runs_and_a_single_question_have_an_interval_without_width():
    assert paired_interval([1, 0], [1, 0]) == (0, 0, 0)
    assert paired_interval([0], [1]) == (1, 1, 1)


class ByContext:
    """P(answer | context) by the context's first id; the probe has two scored tokens of equal probability."""

    def __init__(self, probabilities: dict[int, float]) -> None:
        self._probabilities = probabilities

    async def __call__(self, request: LogProbRequest) -> LogProbResult:
        contexts = [request.segments[request.segments[i].parent].ids[0] for i in request.marked]
        logprobs = tuple(np.full(2, np.log(self._probabilities[c]), np.float32) for c in contexts)
        return LogProbResult(request.id, 0, logprobs)

    async def begin(self, num_requests: int) -> None:
        raise AssertionError("probes are not part of a deterministic step")


async def test_probe_ratios_compare_mean_probabilities():
    probe = Probe((7, 8, 9, 10), 1, 3)

    def contexts(task_id: str, *firsts: int) -> ProbeContexts:
        return ProbeContexts(task_id, *(np.array([first, 1], np.int32) for first in firsts), probe)

    logprobs = ByContext({1: 0.9, 2: 0.1, 3: 0.6, 4: 0.2, 5: 0.7, 6: 0.3, 7: 0.8, 8: 0.2})
    values = await probe_ratios([contexts("a", 1, 2, 3, 4), contexts("b", 5, 6, 7, 8)], logprobs, 1.0)
    assert values["p_mem_ratio"] == pytest.approx((0.9 + 0.7) / (0.1 + 0.3), rel=1e-5)
    assert values["p_full_ratio"] == pytest.approx((0.6 + 0.8) / (0.2 + 0.2), rel=1e-5)
    assert values["p_mem_oracle"] == pytest.approx(0.8, rel=1e-5)
    assert values["num_probe_trajectories"] == 2


async def test_probe_ratios_of_no_trajectory_are_no_numbers():
    assert await probe_ratios([], ByContext({}), 1.0) == {}
