"""Scorers and managers by name. A built-in is listed by path, so that checking a name imports nothing."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Score
from mempo_ray.errors import DataError
from mempo_ray.registry import Registry, place_of
from mempo_ray.rewards.contract import Response, Scorer
from mempo_ray.rewards.golds import GoldCheck, answer_golds, any_golds, number_golds, program_golds, single_gold

Isolation = Literal["thread", "sandbox", "process"]
"""What a scorer needs. thread: nothing. sandbox: a thread, and a place in the sandbox from its start, since waiting for
one would count as its own time. process: a main thread (signals), or to be killed, since it may never return."""


@dataclass(frozen=True)
class ScorerEntry:
    """A registered scorer, and what must be known of it before it is imported."""

    scorer: Scorer | str  # or "module:attribute", imported by `load`
    golds: GoldCheck = any_golds  # the gold answers that it takes
    isolation: Isolation = "thread"
    transcript: bool = False  # it is given `Response.tool_texts`

    def load(self) -> Scorer:
        if not isinstance(self.scorer, str):
            return self.scorer
        module, _, attribute = self.scorer.partition(":")
        return getattr(importlib.import_module(module), attribute)


SCORERS: Registry[ScorerEntry] = Registry("reward.scorer")
"""By scorer name and by `data_source`: `reward.scorer: auto` looks up the row's data source here."""


def register_scorer(
    *names: str, golds: GoldCheck = any_golds, isolation: Isolation = "thread", transcript: bool = False
) -> Callable[[Scorer], Scorer]:
    """Decorator: this function scores the data sources `names`.

    Args:
        golds: raises DataError for gold answers that the scorer cannot use, returns those that it can.
        isolation: "process" runs it in a process of its own (`reward.isolation`); "sandbox" is for a scorer that runs
            code in the sandbox (`reward.sandbox.concurrency` at once).
        transcript: hand it the tools' texts too, by turn.

    Raises:
        ConfigError: a name is taken; names both places.

    Example:
        @register_scorer("my-org/task")
        def score(response: Response, settings: Reward) -> float:
            return float(response.answer == response.golds[0][0])
    """

    def add(scorer: Scorer) -> Scorer:
        entry = ScorerEntry(scorer, golds, isolation, transcript)
        for name in names:
            SCORERS.add(name, entry, place_of(scorer))
        return scorer

    return add


def scorer_for(data_source: str, settings: Reward) -> ScorerEntry:
    """`reward.scorer`, or under 'auto' the scorer of the data source: by its name, else by a pattern ('*aime*').

    Raises:
        ConfigError: `reward.scorer` is unknown.
        DataError: the data source is unknown.
    """
    if settings.scorer != "auto":
        return SCORERS.get(settings.scorer)
    if data_source in SCORERS.names:
        return SCORERS.get(data_source)
    for pattern in SCORERS.names:
        if "*" in pattern and fnmatchcase(data_source.lower(), pattern):
            return SCORERS.get(pattern)
    near = difflib.get_close_matches(data_source, SCORERS.names, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise DataError(
        f"data_source {data_source!r} has no scorer{hint}; set reward.scorer (mempo, exact_match, …) for all rows, or "
        "register one by that name (register_scorer, in a module of `plugins`)"
    )


class Manager(Protocol):
    """A plain synchronous class, made as `Manager(settings)`, where its scorers run: in the worker, whose threads call
    it side by side, or in each scorer process.

    It may have a class attribute `isolation` (process | ray) that overrules `reward.isolation`, and a method
    `score_batch(responses) -> list[Score]`; where it has, responses that wait are scored together.
    """

    def score(self, response: Response) -> Score:
        """Never raises for what a scorer does; that is an `Unscored`."""
        ...


class ManagerFactory(Protocol):
    def __call__(self, settings: Reward) -> Manager: ...


MANAGERS: Registry[ManagerFactory] = Registry("reward.manager")
MANAGERS.register_path("naive", "mempo_ray.rewards.managers.naive:NaiveManager")
MANAGERS.register_path("batch", "mempo_ray.rewards.managers.batch:BatchManager")
MANAGERS.register_path("dapo", "mempo_ray.rewards.managers.dapo:DapoManager")
MANAGERS.register_path("prime", "mempo_ray.rewards.managers.isolated:PrimeManager")
MANAGERS.register_path("remote", "mempo_ray.rewards.managers.isolated:RemoteManager")
MANAGERS.register_path("hybrid", "mempo_ray.rewards.managers.hybrid:HybridManager")


def load_manager(settings: Reward) -> Manager:
    """The configured manager, ready to score.

    Raises:
        ConfigError: unknown manager or scorer, or a custom function that cannot be loaded. The preflight calls this
            before anything starts.
    """
    return MANAGERS.get(settings.manager)(settings)


def _built_in(
    path: str, *names: str, golds: GoldCheck = answer_golds, isolation: Isolation = "thread", transcript: bool = False
) -> None:
    where = f"mempo_ray.rewards.scorers.{path}"
    for name in names:
        SCORERS.add(name, ScorerEntry(where, golds, isolation, transcript), where)


_SEARCH_QA = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_MATH = ("math", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_DAPO = ("math_dapo", "math_dapo_reasoning", "*dapo-math*")
_NUMINA = ("numina_*",)

_built_in("mempo:score_mempo", "mempo", "own", "synthetic")
_built_in("search_qa:score_exact_match", "exact_match", *_SEARCH_QA, *(f"searchR1_{name}" for name in _SEARCH_QA))
_built_in("search_qa:score_substring_match", "substring_match")
_built_in("search_qa:score_f1", "f1")
_built_in("gsm8k:score_gsm8k", "gsm8k", "openai/gsm8k", golds=number_golds)
_built_in("gsm8k:score_gsm8k_flexible", "gsm8k_flexible", golds=number_golds)
_built_in("mathematics:score_math", *_MATH, *_DAPO, *_NUMINA, "aime", "*aime*", golds=single_gold, isolation="process")
_built_in("geometry3k:score_geometry3k", "geometry3k", "hiyouga/geometry3k", golds=single_gold, isolation="process")
_built_in(
    "code:score_code", "code", "codecontests", "apps", "codeforces", "taco", golds=program_golds, isolation="sandbox"
)
