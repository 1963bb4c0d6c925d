"""RewardManagerWorker: a synchronous reward manager behind an async actor (M6).

consumes   one trajectory's payload (a top-level argument: Ray fetches it), or one of many
produces   Scored | Unscored
waits      `reward.timeout_s` for each call of a scorer, counted from its start; the parts of a hybrid reward their own
on failure a scorer that raises, lies, hangs or ends its process gives Unscored, never a zero, and blocks no other

    payload ──to_score──▶ Response ──▶ ManagerHost (manager_host.py)   one manager, where its scorers belong
                                  └──▶ HybridHost (hybrid_host.py)     a manager, judge or reward model for each part
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import ray
from ray.actor import ActorHandle

from mempo_ray.actors.calls import CLOSE_S
from mempo_ray.actors.hybrid_host import HybridHost
from mempo_ray.actors.manager_host import NUM_THREADS, ManagerHost, batches_in, calls_in, scores_batches
from mempo_ray.actors.metrics_sink import ActorGauges
from mempo_ray.actors.names import own_name
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, Scored, TrajectoryBatch
from mempo_ray.rewards.contract import Response, all_to_score, to_score, with_tool_rewards
from mempo_ray.rewards.hosting import import_plugins, place_of
from mempo_ray.rewards.isolation import START_S
from mempo_ray.rewards.managers.hybrid import part_settings, parts_for
from mempo_ray.rewards.registry import MANAGERS

QUEUED_PER_PROCESS = 4  # calls sent ahead, so that no process waits for the driver


def calls_at_once(settings: Reward) -> int:
    """How many trajectories one worker is sent before it has answered any."""
    batched = 2 * settings.batch_size if scores_batches(settings) else 0
    judged = max((style.judge.concurrency for style in settings.styles.values() if style.style == "api"), default=0)
    modelled = max((settings.batch_size for style in settings.styles.values() if style.style == "model"), default=0)
    return max(NUM_THREADS, QUEUED_PER_PROCESS * settings.processes, batched, judged, modelled)


def scored_at_once(settings: Reward, data_source: str) -> int:
    """How many responses of this source one worker scores at once, none waiting for another: as its slowest part."""
    if not settings.styles:
        place = place_of(settings, data_source)
        return calls_in(settings, place) * (settings.batch_size if batches_in(settings, place) else 1)
    parts = {name: settings.styles[name] for name in parts_for(settings.styles, data_source)}
    return min(
        (
            style.judge.concurrency
            if style.style == "api"
            else scored_at_once(part_settings(name, settings), data_source)
            for name, style in parts.items()
            if style.style != "model"  # takes any number, and scores them together
        ),
        default=NUM_THREADS,
    )


def longest_call_s(settings: Reward) -> float:
    """After which a worker that has not answered is no longer waited for: every call before it may have hung, and its
    process may have had to be started again each time."""
    num_rules = sum(style.style in ("rule", "sandbox") for style in settings.styles.values())
    rules_s = (settings.timeout_s + START_S) * calls_at_once(settings) * max(1, num_rules) / settings.processes
    parts_s = [max(style.judge.timeout_s, style.reward_model.timeout_s) for style in settings.styles.values()]
    return max([rules_s, *parts_s]) + CLOSE_S


class RewardManagerWorker:
    """Reads payloads, and has their trajectories scored by the configured manager. Lives in one event loop.

    Args:
        limiter: the cluster's limiter of judges; None: limits that hold for this worker alone.
        reward_models: actors of the `style: model` parts, by name of the part.
    """

    def __init__(
        self,
        settings: Reward,
        plugins: Sequence[str] = (),
        limiter: ActorHandle | None = None,
        reward_models: Mapping[str, ActorHandle] | None = None,
    ) -> None:
        """Raises ConfigError: unknown manager or scorer, or a file of a part that cannot be loaded."""
        import_plugins(plugins)
        MANAGERS.check(settings.manager)
        self._settings = settings
        self._host = (
            HybridHost(settings, plugins, limiter, reward_models or {})
            if settings.styles
            else ManagerHost(settings, plugins)
        )
        self._counts: Counter[str] = Counter(num_in_flight=0, num_scored=0, num_unscored=0)
        ActorGauges("reward").keep(lambda: {f"scorer/{name}": count for name, count in self._counts.items()})

    def __repr__(self) -> str:
        return f"RewardManagerWorker({own_name()}, {self._settings.manager})"

    async def ping(self) -> None:
        """Returns once the actor has started."""

    async def score(self, batch: TrajectoryBatch) -> Score:
        """The outcome of the one trajectory in `batch`. kind of an Unscored: timeout | scorer_error | data | …"""
        response = to_score(batch, transcript=True)
        self._counts["num_in_flight"] += 1
        try:
            score = await self.judge(response) if isinstance(response, Response) else response
        finally:
            self._counts["num_in_flight"] -= 1
        self._counts["num_scored" if isinstance(score, Scored) else "num_unscored"] += 1
        return score

    async def judge(self, response: Response) -> Score:
        """The outcome of a response that is here already."""
        return with_tool_rewards(await self._host.score(response), response, self._settings)

    async def score_batch(self, batch: TrajectoryBatch) -> list[Score]:
        """The outcomes of all trajectories in `batch`, in order."""
        found = all_to_score(batch, transcript=True)
        scores = iter(await self._host.score_all([each for each in found if isinstance(each, Response)]))
        return [
            with_tool_rewards(next(scores), each, self._settings) if isinstance(each, Response) else each
            for each in found
        ]

    async def pids(self) -> list[int]:
        """Of the scorer processes that live now."""
        return self._host.pids

    async def close(self) -> None:
        """Waits for no scorer."""
        await self._host.close()


RewardManagerActor = ray.remote(max_concurrency=1024)(RewardManagerWorker)  # pyrefly: ignore[unexpected-keyword]
