"""A user's reward function from a file (`reward.custom_function`), with the signature that verl's users have."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mempo_ray.config.schema import CustomFunction, Reward
from mempo_ray.contracts.trajectory import GIVEN_TRUTH
from mempo_ray.errors import ConfigError
from mempo_ray.rewards.contract import Response, Scorer


def load_custom_scorer(section: CustomFunction) -> Scorer:
    """`compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)` as a scorer; may be `async def`.

    solution_str   the policy's own text of all turns, a line break between turns; tool text is not in it
    ground_truth   verl's `reward_model.ground_truth` as the row holds it, {"target": …} included; of other rows a str,
                   list of aliases, or list of lists (several objectives): the simplest form that holds all
    extra_info     the row's metadata (verl's extra_info), and those of contract.RESPONSE_INFO that the row lacks
    kwargs         `reward.custom_function.kwargs`
    returns        a number, or a dict with 'score', anything else to report, and perhaps 'process_scores'

    Raises:
        ConfigError: there is no such file, it does not import, or it has no such function.
    """
    function = _load(section)

    def score(response: Response, settings: Reward) -> object:
        return function(
            data_source=response.data_source,
            solution_str=response.solution,
            ground_truth=ground_truth(response),
            extra_info=dict(response.extra_info),
            **section.kwargs,
        )

    return score


BatchFunction = Callable[[Sequence[Response]], Iterable[object]]


def load_custom_batch_function(section: CustomFunction) -> BatchFunction:
    """`compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)`: lists in and out, in order.

    The elements are those of `load_custom_scorer`.

    Raises:
        ConfigError: as there.
    """
    function: Callable[..., Any] = _load(section)

    def score_all(responses: Sequence[Response]) -> Iterable[object]:
        return function(
            data_sources=[response.data_source for response in responses],
            solution_strs=[response.solution for response in responses],
            ground_truths=[ground_truth(response) for response in responses],
            extra_infos=[dict(response.extra_info) for response in responses],
            **section.kwargs,
        )

    return score_all


def ground_truth(response: Response) -> object:
    """What verl's row holds, else the gold answers in the simplest of the three shapes of a data row."""
    if GIVEN_TRUTH in response.extra_info:
        return response.extra_info[GIVEN_TRUTH]
    golds = response.golds
    if len(golds) > 1:
        return [list(aliases) for aliases in golds]
    (aliases,) = golds
    return aliases[0] if len(aliases) == 1 else list(aliases)


def _load(section: CustomFunction) -> Callable[..., object]:
    path = Path(section.path)
    if not path.is_file():
        raise ConfigError(f"reward.custom_function.path: there is no file {path}; give the path of a Python file")
    spec = importlib.util.spec_from_file_location(f"mempo_custom_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.custom_function.path: {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ConfigError(
            f"reward.custom_function.path: {path} does not import: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, section.name, None)
    if not callable(function):
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise ConfigError(
            f"reward.custom_function.name: {path} has no function {section.name!r}; it has {', '.join(names) or 'none'}"
        )
    return function
