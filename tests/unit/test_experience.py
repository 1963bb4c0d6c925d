"""From episodes to a TrainPlan, with every port in process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from mempo_ray.config.schema import Config
from mempo_ray.contracts import (
    EndReason,
    EpisodeRequest,
    LogProbRequest,
    LogProbResult,
    PayloadRef,
    Score,
    Scored,
    Task,
    Unscored,
)
from mempo_ray.errors import EngineFailed, PayloadLost, TrainingError, WorkerFailed
from mempo_ray.experience import Collected, Sample, adapted_kl_coef, assemble, collect, rollout_metrics, scoring_metrics
from tests.fakes.logprobs import FakeLogProbs, Key
from tests.fakes.rewards import FakeRewards
from tests.fakes.rollouts import VERSION, FakeRollouts, finished

DEADLINE_S = 10


def config(**sections: dict) -> Config:
    return Config.model_validate({"algorithm": {"group_size": 2, "kl_coef": 0}, **sections})


def request(task_id: str, sibling: int) -> EpisodeRequest:
    return EpisodeRequest(Task(task_id, "?", (("a",),), "test"), sibling, seed=sibling)


GROUP = (finished("q", 0, turns=2), finished("q", 1))
"""The worked example of algorithm.md §4: two siblings, of two turns and of one."""
REQUESTS = (request("q", 0), request("q", 1))


async def run(
    settings: Config | None = None,
    *,
    rollouts: FakeRollouts | None = None,
    rewards: FakeRewards | None = None,
    logprobs: FakeLogProbs | None = None,
    scorer: FakeLogProbs | None = None,
) -> Collected:
    ports = (rollouts or FakeRollouts(GROUP), rewards or FakeRewards(q_0=1.0, q_1=0.0))
    return await collect(REQUESTS, *ports, logprobs, settings or config(), VERSION, scorer=scorer)


async def sampled(settings: Config | None = None) -> tuple[Sample, ...]:
    return (await run(settings, logprobs=FakeLogProbs())).samples


# -- collect ------------------------------------------------------------------------------------------------


async def test_samples_come_back_in_the_order_of_the_requests_whoever_ended_first():
    collected = await run(rollouts=FakeRollouts(GROUP[::-1]), logprobs=FakeLogProbs())

    assert [sample.key for sample in collected.samples] == [("q", 0), ("q", 1)]
    assert [sample.score for sample in collected.samples] == [Scored(1.0), Scored(0.0)]
    rewards = [[m.reward for m in sample.memory] for sample in collected.samples]
    assert rewards[0] == pytest.approx([0.2, 0.6])
    assert rewards[1] == pytest.approx([-0.1])


async def test_after_the_last_episode_outcomes_alone_are_waited_for_once_the_last_log_prob_is_there():
    without = await run(settings=config(memory_reward={"weight": 0}))
    assert without.outcomes_s == without.exposed_s
    with_memory = await run(logprobs=FakeLogProbs())
    assert 0 <= with_memory.outcomes_s < with_memory.exposed_s


async def test_streaming_scores_a_trajectory_while_others_still_run():
    logprobs = FakeLogProbs()

    async def first_was_scored(index: int) -> None:
        if index == 1:
            await asyncio.wait_for(logprobs.was_asked.wait(), DEADLINE_S)

    await run(rollouts=FakeRollouts(GROUP, first_was_scored), logprobs=logprobs)
    assert logprobs.journal == ["memory/q/0/0", "memory/q/1/0"]


@pytest.mark.parametrize("sections", [{"memory_reward": {"streaming": False}}, {"run": {"deterministic": True}}])
async def test_without_streaming_nobody_asks_before_the_last_episode_has_ended(sections):
    logprobs, rewards = FakeLogProbs(), FakeRewards(q_0=1.0, q_1=0.0)

    async def outcome_only(index: int) -> None:
        while index == 1 and not rewards.asked:
            await asyncio.sleep(0)
        assert logprobs.journal == []

    collected = await run(
        config(**sections), rollouts=FakeRollouts(GROUP, outcome_only), rewards=rewards, logprobs=logprobs
    )
    assert all(sample.memory for sample in collected.samples)


async def test_deterministic_mode_says_how_many_requests_come_before_the_first():
    logprobs = FakeLogProbs()
    await run(config(run={"deterministic": True}), logprobs=logprobs)
    assert logprobs.journal == ["begin 2", "memory/q/0/0", "memory/q/1/0"]


async def test_deterministic_mode_does_not_announce_a_step_without_requests():
    logprobs = FakeLogProbs()
    await run(config(run={"deterministic": True}, memory_reward={"weight": 0}), logprobs=logprobs)
    assert logprobs.journal == []


async def test_a_payload_that_went_with_its_node_costs_its_trajectory_and_no_other():
    class Scorer(FakeLogProbs):
        async def __call__(self, request: LogProbRequest) -> LogProbResult:
            if request.id.startswith("memory/q/0"):
                raise PayloadLost("its node is gone")
            return await super().__call__(request)

    lost, kept = (await run(logprobs=Scorer())).samples
    assert lost.score == Unscored("its node is gone", kind="infrastructure")
    assert lost.excluded_because is not None
    assert (kept.score, len(kept.memory)) == (Scored(0.0), 1)


async def test_evaluation_asks_for_the_outcome_only():
    collected = await run(logprobs=None)
    assert [(sample.score, sample.memory) for sample in collected.samples] == [(Scored(1.0), ()), (Scored(0.0), ())]


@pytest.mark.parametrize("broken", [finished("q", 1, end_reason=EndReason.ENGINE_FAILED), finished("q", 1, turns=0)])
async def test_an_episode_that_broke_is_neither_scored_nor_a_zero(broken):
    rewards, logprobs = FakeRewards(q_0=1.0), FakeLogProbs()
    collected = await run(rollouts=FakeRollouts((GROUP[0], broken)), rewards=rewards, logprobs=logprobs)

    assert collected.samples[1].score is None
    assert collected.samples[1].excluded_because
    assert rewards.asked == ["q/0"]
    assert logprobs.journal == ["memory/q/0/0"]


async def test_a_refused_request_is_offered_again():
    logprobs = FakeLogProbs(refusals=1)
    collected = await run(logprobs=logprobs)
    assert len(logprobs.journal) == 3
    assert all(sample.memory for sample in collected.samples)


async def test_a_broken_scoring_engine_ends_the_step_at_once_and_leaves_no_task():
    class Broken(FakeLogProbs):
        async def __call__(self, request: LogProbRequest) -> LogProbResult:
            raise WorkerFailed("rank 1 died")

    async def for_ever(index: int) -> None:
        if index == 1:
            await asyncio.Event().wait()

    with pytest.raises(WorkerFailed, match="rank 1 died"):
        await asyncio.wait_for(run(rollouts=FakeRollouts(GROUP, for_ever), logprobs=Broken()), DEADLINE_S)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_broken_pool_ends_the_step_with_its_own_type():
    async def no_engine(index: int) -> None:
        if index == 1:
            raise EngineFailed("restarted too often")

    with pytest.raises(EngineFailed, match="too often"):
        await run(rollouts=FakeRollouts(GROUP, no_engine), logprobs=FakeLogProbs())


async def test_kl_in_the_reward_asks_both_models_once_a_trajectory():
    settings = config(algorithm={"kl_in_reward": True, "kl_coef": 0}, memory_reward={"weight": 0})
    logprobs = FakeLogProbs()
    collected = await run(settings, logprobs=logprobs)

    assert sorted(logprobs.journal) == [
        f"kl-{model}/q/{sibling}/0" for model in ("live", "reference") for sibling in (0, 1)
    ]
    assert [sample.kl for sample in collected.samples] == [10.0, 5.0]  # 1 a token over all turns


async def test_memories_are_the_scorers_business_and_the_kl_stays_the_policys():
    settings = config(algorithm={"kl_in_reward": True, "kl_coef": 0})
    policy, engines = FakeLogProbs(), FakeLogProbs()
    collected = await run(settings, logprobs=policy, scorer=engines)

    assert engines.journal == ["memory/q/0/0", "memory/q/1/0"]
    assert len(policy.journal) == 4
    assert all(name.startswith("kl-") for name in policy.journal)
    assert all(sample.memory and sample.kl for sample in collected.samples)


def test_hidden_scoring_is_what_did_not_lie_behind_the_last_trajectory():
    assert scoring_metrics(busy_s=4.0, exposed_s=0.5)["scoring/hidden_share"] == 0.875
    assert scoring_metrics(busy_s=4.0, exposed_s=4.1)["scoring/hidden_share"] == 0.0
    assert "scoring/hidden_share" not in scoring_metrics(busy_s=0.0, exposed_s=0.1)


async def test_the_mean_memory_reward_of_a_trajectory_is_in_its_extra_info():
    samples = await sampled()
    assert [sample.extra["traj_avg_mem_reward"] for sample in samples] == pytest.approx([0.4, -0.1])
    assert rollout_metrics(samples, config())["reward/extra/traj_avg_mem_reward"] == pytest.approx(0.15)


# -- assemble -----------------------------------------------------------------------------------------------


async def test_the_worked_example_of_the_algorithm():
    assembled = assemble(await sampled(), config(), step=1, version=VERSION, kl_coef=0)

    (first, second) = assembled.plan.items
    assert (first.outcome_advantage_S[0], second.outcome_advantage_S[0]) == pytest.approx(
        (0.707106, -0.707106), abs=1e-6
    )
    assert first.memory_advantage_S == pytest.approx((-0.094916, 1.044071), abs=1e-6)
    assert second.memory_advantage_S == pytest.approx((-0.949155,), abs=1e-6)
    assert assembled.plan.mini_batches == ((0, 1),)
    assert assembled.plan.policy_version == VERSION
    assert assembled.advantages["q", 1] == (second.outcome_advantage_S, second.memory_advantage_S)


def judged(key: Key, score: Score | float | None, **kwargs) -> Sample:
    return Sample(finished(*key, **kwargs), Scored(score) if isinstance(score, float) else score)


async def test_gdpo_weighs_parts_as_the_reward_does():
    styles = {"em": {"weight": 3.0}, "format": {"weight": 1.0}, "logged": {"weight": 0.0}}
    settings = config(algorithm={"adv_estimator": "gdpo"}, reward={"manager": "hybrid", "styles": styles})
    parts = [{"em": 1.0, "format": 0.0, "logged": 0.0}, {"em": 0.0, "format": 0.1, "logged": 9.0}]
    samples = [
        judged(("q", g), Scored(0.0, {f"part/{name}": score for name, score in p.items()})) for g, p in enumerate(parts)
    ]
    first, second = assemble(samples, settings, step=1, version=VERSION, kl_coef=0).plan.items
    assert first.outcome_advantage_S[0] == pytest.approx(0.707106, abs=1e-5)  # with equal weights the two cancel out
    assert second.outcome_advantage_S[0] == pytest.approx(-0.707106, abs=1e-5)


async def test_an_unscored_trajectory_leaves_the_group_s_statistics():
    samples = [judged(("q", g), score) for g, score in enumerate((1.0, 0.0, Unscored("took 30 s", "timeout")))]
    settings = config(reward={"max_unscored_share": 0.5})
    plan = assemble(samples, settings, step=1, version=VERSION, kl_coef=0).plan

    assert [item.summary.sibling for item in plan.items] == [0, 1]
    assert [item.outcome_advantage_S[0] for item in plan.items] == pytest.approx([0.707106, -0.707106], abs=1e-6)


LATE = Unscored("took 30 s", "timeout")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {},
            r"3 of 6 .*reward\.max_unscored_share is 20%: 2 × unscored: timeout: took 30 s; 1 × unscored: scorer_err",
        ),
        ({"reward": {"max_unscored_share": 0.5}}, r"2 of 6 .*run\.max_excluded_share is 20%: 2 × tool_failed"),
    ],
)
async def test_too_many_unscored_or_broken_end_the_run_each_with_its_own_key_and_reasons(limits, message):
    samples = [
        judged(("q", 0), 1.0),
        *(judged(("q", g), LATE) for g in (1, 2)),
        judged(("q", 3), Unscored("KeyError: 'x'", "scorer_error")),
        *(judged(("r", g), None, end_reason=EndReason.TOOL_FAILED) for g in (0, 1)),
    ]
    with pytest.raises(TrainingError, match=message):
        assemble(samples, config(**limits), step=1, version=VERSION, kl_coef=0)


class FlakyRewards(FakeRewards):
    """The first answers are `first`, in turn."""

    def __init__(self, first: Sequence[Score], **scores: float) -> None:
        super().__init__(**scores)
        self._first = list(first)

    async def score(self, payload: PayloadRef) -> Score:
        score = await super().score(payload)
        return self._first.pop(0) if self._first else score


@pytest.mark.parametrize(
    ("first", "max_rescores", "score", "num_rescores"),
    [
        ([LATE], 1, Scored(1.0), 1),
        ([Unscored("actor died", "infrastructure"), LATE], 2, Scored(1.0), 2),
        ([LATE, LATE], 1, LATE, 1),
        ([LATE], 0, LATE, 0),
        ([Unscored("KeyError", "scorer_error")], 3, Unscored("KeyError", "scorer_error"), 0),  # it would fail again
    ],
)
async def test_only_what_nobody_has_judged_is_scored_again_and_within_the_limit(
    first, max_rescores, score, num_rescores
):
    rewards = FlakyRewards(first, q_0=1.0)
    settings = config(reward={"max_rescores": max_rescores, "max_unscored_share": 1})
    collected = await run(settings, rollouts=FakeRollouts(GROUP[:1]), rewards=rewards, logprobs=None)
    (sample,) = collected.samples
    assert (sample.score, sample.num_rescores, len(rewards.asked)) == (score, num_rescores, num_rescores + 1)
    metrics = rollout_metrics(collected.samples, settings)
    assert metrics["rollout/num_rescores"] == num_rescores
    assert metrics["rollout/unscored_share"] == isinstance(score, Unscored)


async def test_a_turn_of_other_weights_is_refused():
    samples = [judged(("q", 0), 1.0), judged(("q", 1), 0.0, version=VERSION - 1)]
    with pytest.raises(TrainingError, match=r"q/1: sampled by weight versions \[2\], the policy is at 3"):
        assemble(samples, config(), step=1, version=VERSION, kl_coef=0)


async def test_a_non_finite_score_is_excluded_not_spread_over_the_group():
    samples = [judged(("q", g), score) for g, score in enumerate((1.0, 0.0, math.nan))]
    settings = config(reward={"max_unscored_share": 0.5})
    assembled = assemble(samples, settings, step=1, version=VERSION, kl_coef=0)
    assert [item.outcome_advantage_S[0] for item in assembled.plan.items] == pytest.approx(
        [0.707106, -0.707106], abs=1e-6
    )


async def test_flat_groups_are_sampled_again_until_the_last_round_and_then_dropped():
    settings = config(
        data={"tasks_per_step": 2}, algorithm={"kl_coef": 0, "group_filter": {"mode": "resample", "max_resamples": 1}}
    )
    samples = [judged((task, g), score) for task, scores in {"q": (1.0, 0.0), "r": (0.0, 0.0)}.items()
               for g, score in enumerate(scores)]  # fmt: skip

    first, last = (
        assemble(samples, settings, step=1, version=VERSION, kl_coef=0, filter_round=filter_round)
        for filter_round in (0, 1)
    )
    assert (first.num_missing_tasks, last.num_missing_tasks) == (1, 0)
    for assembled in (first, last):
        assert {item.summary.task_id for item in assembled.plan.items} == {"q"}
        assert assembled.metrics["group/kept_share"] == 0.5


async def test_a_mini_batch_holds_whole_groups():
    settings = config(algorithm={"kl_coef": 0, "mini_batches": 2})
    samples = [judged((f"q{task}", g), float(g)) for task in range(4) for g in range(2)]
    plan = assemble(samples, settings, step=1, version=VERSION, kl_coef=0).plan

    assert sorted(index for part in plan.mini_batches for index in part) == list(range(8))
    for part in plan.mini_batches:
        tasks = [plan.items[index].summary.task_id for index in part]
        assert len(tasks) == 4
        assert all(tasks.count(task) == 2 for task in tasks)


async def test_the_kl_penalty_moves_the_outcome_and_not_the_memory():
    settings = config(algorithm={"kl_in_reward": True, "kl_coef": 0, "normalize_by_std": False})
    samples = await sampled(settings)
    plain, penalised = (
        assemble(samples, settings, step=1, version=VERSION, kl_coef=coef).plan.items for coef in (0.0, 0.01)
    )
    # scores 1 − .01·10 and 0 − .01·5, centred
    assert [item.outcome_advantage_S[0] for item in penalised] == pytest.approx([0.475, -0.475])
    assert [item.memory_advantage_S for item in penalised] == [item.memory_advantage_S for item in plain]


async def test_kappa_stays_without_a_controller_and_moves_towards_its_target_with_one():
    fixed = config(algorithm={"kl_in_reward": True, "kl_coef": 0})
    steered = config(
        algorithm={"kl_in_reward": True, "kl_coef": 0, "adaptive_kl": {"target": 0.5, "horizon": 10}},
    )
    samples = await sampled(fixed)  # 1 nat a token
    assert adapted_kl_coef(samples, fixed, 0.1) == 0.1
    assert adapted_kl_coef(samples, steered, 0.1) == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    assert adapted_kl_coef((), steered, 0.1) == 0.1


async def test_good_replacements_end_the_resampling():
    settings = config(
        data={"tasks_per_step": 2}, algorithm={"kl_coef": 0, "group_filter": {"mode": "resample", "max_resamples": 3}}
    )
    good, flat = (1.0, 0.0), (0.0, 0.0)
    samples = [
        judged((task, g), score)
        for task, scores in {"q": good, "r": flat, "s": good}.items()
        for g, score in enumerate(scores)
    ]
    assembled = assemble(samples, settings, step=1, version=VERSION, kl_coef=0, filter_round=1)
    assert assembled.num_missing_tasks == 0
    assert {item.summary.task_id for item in assembled.plan.items} == {"q", "s"}


async def test_numbers_that_a_scorer_reports_are_averaged_over_those_that_have_them():
    samples = [
        judged(("q", 0), Scored(1.0, {"format/mem": True, "num_surplus_parts": 2, "note": "text"})),
        judged(("q", 1), Scored(0.0, {"format/mem": False})),
    ]
    metrics = assemble(samples, config(), step=1, version=VERSION, kl_coef=0).metrics
    assert (metrics["reward/extra/format/mem"], metrics["reward/extra/num_surplus_parts"]) == (0.5, 2.0)
    assert "reward/extra/note" not in metrics
