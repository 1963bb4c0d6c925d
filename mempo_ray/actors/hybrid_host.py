"""The parts of a hybrid reward, asked side by side, each where it belongs.

response ──parts_for──▶ rule, sandbox   a ManagerHost of its own; all share the worker's scorer processes
                        api             an ApiJudge, under the cluster's limits (limiter.py)
                        model           the reward model's actor (reward_model.py)
         ◀──combine──── Scored | Unscored of each
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ray.actor import ActorHandle

from mempo_ray.actors.calls import CLOSE_S, answer
from mempo_ray.actors.limiter import JudgeLimiter, RayLimiter
from mempo_ray.actors.manager_host import ManagerHost, scorer_processes
from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score, Unscored
from mempo_ray.errors import ConfigError, InfrastructureError
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.managers.hybrid import combine, part_settings, parts_for
from mempo_ray.rewards.styles.api import ApiJudge

Part = Callable[[Response], Awaitable[Score]]


class HybridHost:
    """Scores responses by all parts that apply to their data source. Lives in one event loop."""

    def __init__(
        self,
        settings: Reward,
        plugins: Sequence[str],
        limiter: ActorHandle | None,
        reward_models: Mapping[str, ActorHandle],
    ) -> None:
        """Raises ConfigError: a part's scorer, template or model is not there."""
        self._settings = settings
        self._hosts: list[ManagerHost] = []
        self._judges: list[ApiJudge] = []
        rules = [name for name, style in settings.styles.items() if style.style in ("rule", "sandbox")]
        self._pool = scorer_processes(settings, {name: part_settings(name, settings) for name in rules}, plugins)
        self._limiter = JudgeLimiter(settings.styles) if limiter is None else RayLimiter(limiter)
        self._parts = {name: self._part(name, plugins, reward_models) for name in settings.styles}

    async def score(self, response: Response) -> Score:
        styles = self._settings.styles
        names = parts_for(styles, response.data_source)
        scores = await asyncio.gather(*(self._parts[name](response) for name in names))
        return combine(styles, dict(zip(names, scores, strict=True)))

    async def score_all(self, responses: Sequence[Response]) -> list[Score]:
        return list(await asyncio.gather(*map(self.score, responses)))

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    async def close(self) -> None:
        await asyncio.gather(*(closing.close() for closing in (*self._hosts, *self._judges)))

    def _part(self, name: str, plugins: Sequence[str], reward_models: Mapping[str, ActorHandle]) -> Part:
        style = self._settings.styles[name]
        if style.style == "api":
            judge = ApiJudge(name, style.judge, self._limiter)
            self._judges.append(judge)
            return judge
        if style.style == "model":
            if name not in reward_models:
                raise ConfigError(f"reward.styles.{name}: a reward model is served by a run's fleet, and there is none")
            return _ModelPart(name, reward_models[name], style.reward_model.timeout_s)
        host = ManagerHost(part_settings(name, self._settings), plugins, part=name, pool=self._pool)
        self._hosts.append(host)
        return host.score


class _ModelPart:
    """A reward model's actor as a part."""

    def __init__(self, name: str, handle: ActorHandle, timeout_s: float) -> None:
        self._name, self._handle, self._timeout_s = name, handle, timeout_s

    async def __call__(self, response: Response) -> Score:
        question = str(response.extra_info.get("question", ""))
        call = self._handle.score.remote(question, response.turns)
        try:
            return await answer(call, f"reward model {self._name}", self._timeout_s + CLOSE_S)
        except InfrastructureError as error:
            return Unscored(str(error), "infrastructure")
