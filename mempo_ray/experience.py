"""From episode requests to a TrainPlan: what happens to a trajectory between its last token and the update.

    stage     consumes               produces            unblocked by             on failure
    collect   EpisodeRequest         Sample              its episode's end        infrastructure: excluded, counted
      score   PayloadRef             Scored | Unscored   at once                  Unscored: excluded, counted
      memory  LogProbRequest         MemorySample        at once; the last end    the step fails, typed
                                                         where not streaming
    assemble  Sample of a step       TrainPlan, metrics  the last sample          too many excluded: the run ends

Only summaries and numbers pass through here; payloads stay in the object store.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mempo_ray.algo.advantage import (
    GroupAdvantages,
    ScoredTrajectory,
    exclusion_reason,
    filter_groups,
    memory_metrics,
    mini_batches,
    step_advantages,
)
from mempo_ray.algo.kl_reward import kl_request, next_kl_coef, token_kl
from mempo_ray.algo.memory_reward import MemoryRequest, MemorySample, dropped_turns
from mempo_ray.algo.registry import MEMORY_REWARDS
from mempo_ray.config.schema import Config
from mempo_ray.contracts import (
    EpisodeRequest,
    Finished,
    LogProbRequest,
    LogProbResult,
    PayloadRef,
    Score,
    Scored,
    TrainItem,
    TrainPlan,
    TrajectorySummary,
    Unscored,
)
from mempo_ray.errors import MempoError, Overloaded, PayloadLost, TrainingError
from mempo_ray.ports import LogProbs, Rewards, Rollouts

UNJUDGED = ("timeout", "infrastructure")  # kinds of Unscored that another try may mend
RETRY_S = 0.5  # wait before a refused (Overloaded) request is offered again


@dataclass(frozen=True)
class Sample:
    """One finished trajectory with all that was said about it. `score` None: not asked, the episode broke."""

    finished: Finished
    score: Score | None = None
    memory: tuple[MemorySample, ...] = ()
    kl_T: np.ndarray | None = None  # log π_old − log π_ref of all output tokens, only under kl_in_reward
    num_rescores: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.finished.summary.task_id, self.finished.summary.sibling

    @property
    def kl(self) -> float:
        return 0.0 if self.kl_T is None else float(self.kl_T.sum())

    @property
    def extra(self) -> dict[str, object]:
        """reward_extra_info: what the scorer reported, and the mean memory reward over the turns that have one."""
        extra = dict(self.score.extra) if isinstance(self.score, Scored) else {}
        if self.memory:
            extra["traj_avg_mem_reward"] = float(np.mean([sample.reward for sample in self.memory]))
        return extra

    @property
    def is_unscored(self) -> bool:
        """Excluded for want of a score; the episode itself is whole."""
        return (self.excluded_because or "").startswith("unscored")

    @property
    def excluded_because(self) -> str | None:
        return exclusion_reason(self.finished.summary, self.score)

    def survivor(self) -> Survivor | None:
        """What the statistics and the update see of it; None: excluded."""
        if self.excluded_because is not None or self.finished.payload is None or not isinstance(self.score, Scored):
            return None
        return Survivor(self.finished.payload, self.finished.summary, self.score, self.memory, self.kl)


@dataclass(frozen=True)
class Survivor:
    """A scored trajectory that counts."""

    payload: PayloadRef
    summary: TrajectorySummary
    score: Scored
    memory: tuple[MemorySample, ...]
    kl: float

    @property
    def outcome(self) -> float:
        return self.score.score

    def as_scored(self, kl_coef: float, part_weights: Mapping[str, float]) -> ScoredTrajectory:
        return ScoredTrajectory(
            self.outcome,
            self.summary.num_turns,
            self.summary.format_valid,
            self.memory,
            penalty=kl_coef * self.kl,
            num_tokens=self.summary.num_output_tokens,
            process_S=self.score.process_scores,
            parts=self.score.parts,
            part_weights=part_weights,
        )


@dataclass(frozen=True)
class Collected:
    """All trajectories of a step, in (task, sibling) order of the requests, and the clock of the critical path."""

    samples: tuple[Sample, ...]
    generation_s: float  # until the last episode ended
    exposed_s: float  # from there to the last score received: what scoring adds to the step
    outcomes_s: float = 0.0  # of these, after the last log-prob: only outcomes were waited for

    @property
    def exposed_logprobs_s(self) -> float:
        """Until the last log-prob: a slow judge of outcomes exposes no log-prob."""
        return self.exposed_s - self.outcomes_s

    @classmethod
    def of(cls, rounds: Sequence[Collected]) -> Collected:
        """One step out of the rounds of a group filter."""
        samples = tuple(sample for part in rounds for sample in part.samples)
        return cls(
            samples,
            sum(part.generation_s for part in rounds),
            sum(part.exposed_s for part in rounds),
            sum(part.outcomes_s for part in rounds),
        )


def scoring_metrics(busy_s: float, exposed_s: float) -> dict[str, float]:
    """How much of the scoring lay beside generation. `busy_s`: seconds in which log-probs were computed;
    `exposed_s`: from the last trajectory's end to the last of them. A step without log-probs has no share.

    Example:
        >>> scoring_metrics(busy_s=4.0, exposed_s=0.5)
        {'scoring/busy_s': 4.0, 'scoring/exposed_s': 0.5, 'scoring/hidden_share': 0.875}
    """
    share = {"scoring/hidden_share": max(0.0, 1 - exposed_s / busy_s)} if busy_s > 0 else {}
    return {"scoring/busy_s": busy_s, "scoring/exposed_s": exposed_s, **share}


async def collect(
    requests: Sequence[EpisodeRequest],
    rollouts: Rollouts,
    rewards: Rewards,
    logprobs: LogProbs | None,
    config: Config,
    version: int,
    on_finished: Callable[[], None] = lambda: None,
    *,
    scorer: LogProbs | None = None,
) -> Collected:
    """Run the episodes and judge each as it ends.

    Args:
        logprobs: the policy; None: outcome only (evaluation).
        scorer: who is asked about memories in the policy's place (`memory_reward.scorer_engine`).

    Raises:
        InfrastructureError: an engine pool, worker or scorer failed beyond what is tolerated.
    """
    began = time.monotonic()
    judge = _Judge(rewards, logprobs, scorer or logprobs, config, version)
    if config.streams_scoring:
        judge.may_ask.set()
    judged: list[asyncio.Task[Sample]] = []
    try:
        async with asyncio.TaskGroup() as judging:  # a judge that fails ends the episodes too, not only their step
            async for finished in rollouts.run(requests):
                judged.append(judging.create_task(judge(finished, judge.questions(finished))))
                on_finished()
            generated = time.monotonic()
            if config.run.deterministic and logprobs is not None and judge.num_asked:
                await logprobs.begin(judge.num_asked)
            judge.may_ask.set()
    except* MempoError as errors:
        raise errors.exceptions[0] from None
    ended = time.monotonic()
    samples = [task.result() for task in judged]
    order = {(r.task.task_id, r.sibling): i for i, r in enumerate(requests)}
    return Collected(
        tuple(sorted(samples, key=lambda sample: order[sample.key])),
        generated - began,
        ended - generated,
        ended - max(generated, judge.last_answer),
    )


@dataclass(frozen=True)
class _Questions:
    """What the policy is asked about one trajectory."""

    memory: MemoryRequest | None = None
    kl: tuple[LogProbRequest, ...] = ()  # of the live policy and of the reference


class _Judge:
    """Scores one trajectory: its outcome at once, its log-probs when `may_ask` is set."""

    def __init__(
        self, rewards: Rewards, logprobs: LogProbs | None, scorer: LogProbs | None, config: Config, version: int
    ):
        self.may_ask = asyncio.Event()
        self.num_asked = 0
        self.last_answer = 0.0  # when the last log-probs came, of time.monotonic
        self._rewards = rewards
        self._logprobs = logprobs
        self._scorer = scorer
        self._config = config
        self._version = version
        self._memory_reward = MEMORY_REWARDS.get(config.memory_reward.name)

    def questions(self, finished: Finished) -> _Questions:
        """Made when the trajectory ends, so that their number is known when the last one has."""
        payload, summary = finished.payload, finished.summary
        if self._logprobs is None or payload is None or exclusion_reason(summary, Scored(0.0)) is not None:
            return _Questions()
        memory, kl = None, ()
        settings = self._config.memory_reward
        deadline_s = self._config.batch_executor.request_timeout_s
        if settings.weight > 0:
            version = self._version if settings.scorer == "live" else None
            memory = self._memory_reward.request(
                summary, payload, settings, policy_version=version, deadline_s=deadline_s
            )
        if self._config.algorithm.kl_in_reward:
            kl = tuple(
                kl_request(
                    summary,
                    payload,
                    model=model,
                    policy_version=self._version if model == "live" else None,
                    temperature=self._config.rollout.temperature,
                    deadline_s=deadline_s,
                )
                for model in ("live", "reference")
            )
        self.num_asked += (memory is not None) + len(kl)
        return _Questions(memory, kl)

    async def __call__(self, finished: Finished, questions: _Questions) -> Sample:
        if finished.payload is None or exclusion_reason(finished.summary, Scored(0.0)) is not None:
            return Sample(finished)
        sample = Sample(finished)
        try:
            async with asyncio.TaskGroup() as group:
                score = group.create_task(self._score(finished.payload))
                memory = group.create_task(self._memory(questions.memory))
                kl = group.create_task(self._kl(questions.kl))
            outcome, num_rescores = score.result()
            sample = Sample(finished, outcome, memory.result(), kl.result(), num_rescores)
        except* PayloadLost as errors:  # with its node: this trajectory is gone, the others are not
            sample = Sample(finished, Unscored(str(errors.exceptions[0]), kind="infrastructure"))
        except* MempoError as errors:
            raise errors.exceptions[0] from None
        return sample

    async def _score(self, payload: PayloadRef) -> tuple[Score, int]:
        """The outcome, and how often it was asked for again: only where nobody has judged the trajectory yet."""
        num_rescores = 0
        while True:
            score = await self._rewards.score(payload)
            judged = isinstance(score, Scored) or score.kind not in UNJUDGED
            if judged or num_rescores == self._config.reward.max_rescores:
                return score, num_rescores
            num_rescores += 1

    async def _memory(self, asked: MemoryRequest | None) -> tuple[MemorySample, ...]:
        if asked is None or self._scorer is None:
            return ()
        return self._memory_reward.rewards(
            asked, await self._ask(self._scorer, asked.request), self._config.memory_reward
        )

    async def _kl(self, requests: tuple[LogProbRequest, ...]) -> np.ndarray | None:
        if not requests or self._logprobs is None:
            return None
        asked = [self._ask(self._logprobs, request) for request in requests]
        return token_kl(*await asyncio.gather(*asked))

    async def _ask(self, logprobs: LogProbs, request: LogProbRequest) -> LogProbResult:
        """A refused request is offered again until its deadline: back-pressure slows scoring, it loses nothing."""
        await self.may_ask.wait()
        deadline = time.monotonic() + request.deadline_s
        while True:
            try:
                result = await logprobs(request)
                self.last_answer = time.monotonic()
                return result
            except Overloaded:
                if time.monotonic() + RETRY_S > deadline:
                    raise
                await asyncio.sleep(RETRY_S)


@dataclass(frozen=True)
class Assembled:
    """What the step trains on, and everything the log wants to know about it."""

    plan: TrainPlan
    metrics: Mapping[str, float]
    kl_coef: float = 0.0  # κ of this step
    advantages: Mapping[tuple[str, int], tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)
    num_missing_tasks: int = 0  # new tasks that the group filter wants in place of dropped ones


def assemble(
    samples: Sequence[Sample], config: Config, *, step: int, version: int, kl_coef: float, filter_round: int = 0
) -> Assembled:
    """Advantages of all groups and the plan of the step. Pure.

    Raises:
        TrainingError: a turn was sampled by other weights than `version`; or what `check_excluded` raises.
    """
    check_excluded(samples, config)
    groups: dict[str, list[Survivor]] = {}
    for survivor in survivors_of(samples):
        summary = survivor.summary
        if stray := set(summary.weight_versions_S) - {version}:
            raise TrainingError(
                f"{summary.task_id}/{summary.sibling}: sampled by weight versions {sorted(stray)}, the policy is at "
                f"{version}"
            )
        groups.setdefault(summary.task_id, []).append(survivor)
    members = list(groups.values())
    weights = {name: style.weight for name, style in config.reward.styles.items()}
    scored = [[s.as_scored(kl_coef, weights) for s in group] for group in members]
    advantages = step_advantages(scored, config.algorithm, config.memory_reward)
    decision = filter_groups(
        advantages, config.algorithm.group_filter, num_wanted=config.data.tasks_per_step, round_=filter_round
    )
    kept = [(members[i], advantages[i]) for i in decision.kept]
    items = [
        TrainItem(s.payload, s.summary, a.outcome_GS[i], a.memory_GS[i])
        for group, a in kept
        for i, s in enumerate(group)
    ]
    plan = TrainPlan(step, version, tuple(items), _mini_batches(kept, config, step))
    return Assembled(
        plan,
        {
            **rollout_metrics(samples, config),
            **_advantage_metrics(advantages, decision.kept),
            **memory_metrics(advantages),
        },
        kl_coef,
        {
            (item.summary.task_id, item.summary.sibling): (item.outcome_advantage_S, item.memory_advantage_S)
            for item in items
        },
        decision.num_resample,
    )


def survivors_of(samples: Sequence[Sample]) -> list[Survivor]:
    """Those that count, in order."""
    return [survivor for sample in samples if (survivor := sample.survivor()) is not None]


def check_excluded(samples: Sequence[Sample], config: Config) -> None:
    """Too many broken episodes, or too many without a score, are no sample of the policy any more.

    Raises:
        TrainingError: more than `reward.max_unscored_share` have no score, or more than `run.max_excluded_share` broke;
            lists the reasons.
    """
    excluded = [sample for sample in samples if sample.excluded_because is not None]
    for is_unscored, key, limit in (
        (True, "reward.max_unscored_share", config.reward.max_unscored_share),
        (False, "run.max_excluded_share", config.run.max_excluded_share),
    ):
        reasons = Counter(sample.excluded_because for sample in excluded if sample.is_unscored == is_unscored)
        if reasons.total() > limit * len(samples):
            listed = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(5))
            raise TrainingError(
                f"{reasons.total()} of {len(samples)} trajectories are excluded, {key} is {limit:.0%}: {listed}"
            )


def _mini_batches(
    kept: Sequence[tuple[list[Survivor], GroupAdvantages]], config: Config, step: int
) -> tuple[tuple[int, ...], ...]:
    """Indices of items per optimiser step: whole groups, nearly equal tokens."""
    sizes = [len(group) for group, _ in kept]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    tokens = [sum(s.summary.num_row_tokens for s in group) for group, _ in kept]
    parts = mini_batches(tokens, config.algorithm.mini_batches, seed=config.run.seed * 1_000_003 + step)
    return tuple(
        tuple(index for g in sorted(part) for index in range(int(starts[g]), int(starts[g + 1]))) for part in parts
    )


def rollout_metrics(samples: Sequence[Sample], config: Config) -> dict[str, float]:
    """Outcome, shares and lengths; means over scored trajectories, shares over all of them."""
    scored = survivors_of(samples)
    summaries = [s.summary for s in scored]
    metrics = {
        "rollout/num_trajectories": float(len(samples)),
        "rollout/excluded_share": 1 - len(scored) / max(1, len(samples)),
        "rollout/unscored_share": sum(s.is_unscored for s in samples) / max(1, len(samples)),
        "rollout/num_rescores": float(sum(s.num_rescores for s in samples)),
        "rollout/payload_bytes": float(sum(s.finished.summary.num_bytes for s in samples)),  # held until the step ends
        "rollout/num_reencoded": float(sum(s.finished.summary.num_reencoded for s in samples)),
    }
    if not scored:
        return metrics
    scores = [s.outcome for s in scored]
    metrics |= {
        "reward/outcome_mean": float(np.mean(scores)),
        "reward/outcome_std": float(np.std(scores)),
        "rollout/format_valid_share": float(np.mean([s.format_valid for s in summaries])),
        "rollout/turns_mean": float(np.mean([s.num_turns for s in summaries])),
        "rollout/output_tokens": float(sum(s.num_output_tokens for s in summaries)),
        "rollout/output_tokens_mean": float(np.mean([s.num_output_tokens for s in summaries])),
        "rollout/row_tokens": float(sum(s.num_row_tokens for s in summaries)),
        "memory/num_dropped": float(sum(len(dropped_turns(s, config.memory_reward)) for s in summaries)),
        "rollout/memory_turn_share": float(np.mean([m > 0 for s in summaries for m in s.memory_tokens_S])),
    }
    metrics |= _extra_means([s.extra for s in samples])
    reasons = [s.end_reason.value for s in summaries]
    return metrics | {f"rollout/end_{reason}_share": reasons.count(reason) / len(reasons) for reason in set(reasons)}


def _extra_means(extras: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """`reward/extra/<key>`: the mean of each number or truth value that a scorer reported, over those that have it."""
    values: dict[str, list[float]] = {}
    for extra in extras:
        for key, value in extra.items():
            if isinstance(value, bool | int | float):
                values.setdefault(key, []).append(float(value))
    return {f"reward/extra/{key}": float(np.mean(found)) for key, found in values.items()}


def _advantage_metrics(advantages: Sequence[GroupAdvantages], kept: Sequence[int]) -> dict[str, float]:
    """Shares over groups with at least one survivor."""
    num = max(1, len(advantages))
    return {
        "group/num_groups": float(len(advantages)),
        "group/kept_share": len(kept) / num,
        "group/flat_outcome_share": sum(a.is_outcome_flat for a in advantages) / num,
        "group/flat_memory_share": sum(a.is_memory_flat for a in advantages) / num,
    }


def adapted_kl_coef(samples: Sequence[Sample], config: Config, kl_coef: float) -> float:
    """The KL coefficient of the next step; unchanged without `algorithm.adaptive_kl`."""
    settings = config.algorithm.adaptive_kl
    survivors = survivors_of(samples)
    if settings is None or not survivors:
        return kl_coef
    kl = float(np.mean([s.kl / s.summary.num_output_tokens for s in survivors]))
    return next_kl_coef(kl_coef, kl, len(survivors), settings)
