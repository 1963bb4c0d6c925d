"""From a trajectory to rewards on tokens; the trainer knows nothing of where a score came from.

    payload ──to_score──▶ Response ──scorer──▶ Scored | Unscored ──▶ rm_scores ──▶ token_level_scores
       └─ holds rm_scores already ────────────────▲     │                               └─(− κ·KL)─▶ token_level_rewards
                                                        └─▶ reward_extra_info, reward_extra_keys

The columns are named as verl's users know them. They are ragged float32, shaped like `output_ids`: one row a turn.
An `Unscored` trajectory has no row here: it was excluded before, it is never a zero.

`to_score` is the only reader of a payload for scoring, `score_with` the only caller of a scorer, `with_rewards` the
only writer of the columns (trajectory_log.py).
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import numbers
import sysconfig
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mempo_ray.config.schema import Reward
from mempo_ray.contracts import Batch, Ragged, Score, Scored, Task, Trajectory, TrajectoryBatch, Unscored
from mempo_ray.errors import DataError

# -- what a scorer gets -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """One trajectory as a scorer sees it: the policy's own words and the data row. Plain values, cheap to pickle.

    Example:
        >>> Response("own", (("Paris",),), turns=("<mem>m</mem>", "<answer>Paris</answer>")).solution
        '<mem>m</mem>\\n<answer>Paris</answer>'
    """

    data_source: str
    golds: tuple[tuple[str, ...], ...]  # objectives × aliases
    turns: tuple[str, ...]  # the policy's own text of each turn; prompt and tool text are never in it
    answer: str | None = None  # content of the last <answer> of the policy's own tokens, stripped
    format_report: Mapping[str, bool] = field(default_factory=dict)  # check of §2 → passed
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # the row's metadata, and RESPONSE_INFO
    num_tokens: int = 0  # that the policy sampled, over all turns
    tool_texts: tuple[str, ...] = ()  # by turn; only for a scorer registered with `transcript`
    tool_rewards: Mapping[str, float] = field(default_factory=dict)  # by tool, of those that gave one

    @property
    def solution(self) -> str:
        """The policy's own text of all turns, a line break between turns."""
        return "\n".join(self.turns)

    @property
    def format_valid(self) -> bool:
        return all(self.format_report.values())


RESPONSE_INFO = ("task_id", "question", "answer", "format_valid", "num_turns", "end_reason")
"""Keys that `Response.extra_info` has beside the row's metadata."""


def extra_info_of(task: Task, **known: object) -> dict[str, Any]:
    """The row's metadata, and what is known of the response.

    A row keeps its own values (verl's GSM8K has an `answer` there, which must not become the policy's), save for
    `task_id` and `question`.
    """
    return {**known, **task.metadata, "task_id": task.task_id, "question": task.question}


class Scorer(Protocol):
    """The outcome of one response: a number, a dict with 'score' and anything else to report, or a `Score`.

    May raise or answer nonsense: `score_with` makes an `Unscored` of it. May be an `async def`.
    """

    def __call__(self, response: Response, settings: Reward) -> object: ...


def response_of(trajectory: Trajectory, *, transcript: bool = False) -> Response:
    """The trajectory as scorers see it. `transcript`: with what the tools answered."""
    task = trajectory.task
    return Response(
        data_source=task.data_source,
        golds=task.golds,
        turns=tuple(turn.text for turn in trajectory.turns),
        answer=trajectory.answer,
        format_report=trajectory.format_report,
        extra_info=extra_info_of(
            task,
            answer=trajectory.answer,
            format_valid=trajectory.format_valid,
            num_turns=len(trajectory.turns),
            end_reason=trajectory.end_reason.value,
        ),
        num_tokens=sum(int(turn.output_mask.sum()) for turn in trajectory.turns),
        tool_texts=tuple(turn.tool_text for turn in trajectory.turns) if transcript else (),
        tool_rewards=trajectory.tool_rewards,
    )


def to_score(batch: TrajectoryBatch, *, transcript: bool = False) -> Response | Score:
    """The one trajectory of a payload, or its score where there is nothing left to ask.

    A payload with an `rm_scores` column brings its score; one that is not a single whole episode is `Unscored`.
    """
    found = all_to_score(batch, transcript=transcript)
    return found[0] if len(found) == 1 else Unscored(f"a payload of {len(found)} trajectories, expected one", "data")


def all_to_score(batch: TrajectoryBatch, *, transcript: bool = False) -> list[Response | Score]:
    """`to_score` of each trajectory of a payload of many, in order."""
    trajectories = batch.trajectories()
    given: list[Score | None] = [None] * len(trajectories)
    if "rm_scores" in batch.ragged:
        starts = np.append(np.flatnonzero(batch.fixed["turn"] == 0), len(batch))
        borders = batch.ragged["rm_scores"].offsets[starts]
        given = [_given_score(batch.ragged["rm_scores"].values[a:b]) for a, b in itertools.pairwise(borders)]
    found: list[Response | Score] = []
    for trajectory, score in zip(trajectories, given, strict=True):
        if trajectory.end_reason.is_infrastructure:
            found.append(
                Unscored(f"the episode ended as {trajectory.end_reason}: {trajectory.detail}", "infrastructure")
            )
        else:
            found.append(score or response_of(trajectory, transcript=transcript))
    return found


def _given_score(rm_scores_T: np.ndarray) -> Score:
    total = as_score(float(rm_scores_T.sum(dtype=np.float64)))
    return total if isinstance(total, Scored) else Unscored("rm_scores are not finite", "data")


# -- what it answered -------------------------------------------------------------------------------------


def score_with(scorer: Scorer, response: Response, settings: Reward) -> Score:
    """Call a scorer, here and now; whatever it does becomes a value. Not for a thread that runs an event loop."""
    try:
        value = scorer(response, settings)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return as_score(value, num_turns=len(response.turns))
    except DataError as error:
        return Unscored(str(error), "data")
    # a scorer may raise anything, and cancel its own loop; here it becomes a counted value
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
        return Unscored(told(error), "scorer_error")


def told(error: BaseException) -> str:
    """What was raised and where: the innermost line that is neither Python's nor an installed package's.

    Example: "KeyError: 'gold' (my_reward.py, line 12)".
    """
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*installed, "<"))]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def with_tool_rewards(score: Score, response: Response, settings: Reward) -> Score:
    """A manager's score with what the tools say of the episode: the worker's last step, whatever the manager.

    A tool's reward is reported as `tool_reward/<name>`, and adds to the score by its `reward.tool_weights`.
    """
    if isinstance(score, Unscored) or not response.tool_rewards:
        return score
    added = {name: settings.tool_weights.get(name, 0.0) * reward for name, reward in response.tool_rewards.items()}
    told = {f"tool_reward/{name}": reward for name, reward in response.tool_rewards.items()}
    return as_score(replace(score, score=score.score + sum(added.values()), extra={**score.extra, **told}))


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def as_score(value: object, *, num_turns: int | None = None) -> Score:
    """What a scorer returned, as a value that cannot be mistaken: a finite number is a score, all else is not one.

    A dict's 'score' is the score, its 'process_scores' (one finite number a turn) are those, the rest is `extra`.

    Args:
        num_turns: how many process scores there must be; None: any number.

    Example:
        >>> as_score({"score": 1, "em": True})
        Scored(score=1.0, extra={'em': True}, process_scores=None)
        >>> as_score(float("nan"))
        Unscored(reason='score is nan', kind='scorer_error')
    """
    if isinstance(value, Unscored):
        return value
    if isinstance(value, Scored):
        value = {**value.extra, "score": value.score, "process_scores": value.process_scores}
    fields: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"score": value}
    if "score" not in fields:
        return Unscored(f"dict without 'score': {sorted(map(str, fields))}", "scorer_error")
    given = fields.get("process_scores")
    try:
        if isinstance(given, Mapping):  # its keys would be read as the scores
            raise TypeError(f"process_scores is a {type(given).__name__}, not a list of one number a turn")
        score = _finite(fields["score"], "score")
        steps = None if given is None else tuple(_finite(step, "process score") for step in given)
    except (TypeError, ValueError, OverflowError) as error:
        return Unscored(str(error), "scorer_error")
    if steps is not None and num_turns not in (None, len(steps)):
        return Unscored(f"{len(steps)} process scores for {num_turns} turns", "scorer_error")
    extra = {str(key): _plain(item) for key, item in fields.items() if key not in ("score", "process_scores")}
    return Scored(score, extra, steps)


def _finite(value: object, name: str) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise TypeError(f"{name} is a {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {float(value)}")
    return float(value)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


# -- where it lands ---------------------------------------------------------------------------------------


def last_policy_token(output_mask_ST: Sequence[np.ndarray]) -> tuple[int, int]:
    """(turn, token) of the last output token that the policy sampled (mask 1).

    Raises:
        DataError: the policy sampled none.
    """
    for turn in reversed(range(len(output_mask_ST))):
        sampled = np.flatnonzero(output_mask_ST[turn])
        if len(sampled):
            return turn, int(sampled[-1])
    raise DataError("a trajectory without a token of the policy cannot carry a reward")


def place_scores(batch: TrajectoryBatch, scores: Sequence[Score]) -> Ragged:
    """rm_scores: the score on the trajectory's last policy token, each process score on its turn's, 0 elsewhere.

    Args:
        scores: one per trajectory of the batch, in order.

    Raises:
        DataError: a trajectory is unscored, or the numbers of scores and trajectories differ.

    Example: two turns with output masks [1, 1], [1, 1, 0] and score 0.5 give [0, 0], [0, 0.5, 0]; with process scores
    0.1 and 0.2 as well, [0, 0.1], [0, 0.7, 0].
    """
    mask = batch.ragged["output_mask"]
    starts = [*np.flatnonzero(batch.fixed["turn"] == 0).tolist(), len(batch)]
    if len(starts) - 1 != len(scores):
        raise DataError(f"{len(scores)} scores for {len(starts) - 1} trajectories")
    values = np.zeros(len(mask.values), np.float32)
    for (start, stop), score in zip(itertools.pairwise(starts), scores, strict=True):
        if isinstance(score, Unscored):
            raise DataError(f"an unscored trajectory has no token-level score ({score.kind}: {score.reason})")
        masks = [mask[row] for row in range(start, stop)]
        parts = [(len(masks), score.score), *enumerate(score.process_scores or (), start=1)]
        for num_turns, value in parts:  # a turn without policy tokens leaves its score to the turn before
            turn, token = last_policy_token(masks[:num_turns])
            values[mask.offsets[start + turn] + token] += value
    return Ragged(values, mask.offsets)


def token_level_rewards(token_level_scores: Ragged, kl: Ragged, coef: float) -> Ragged:
    """token_level_scores − κ·KL, per token (algorithm.md §5, `kl_in_reward`). `kl` is log π_old − log π_ref."""
    if not np.array_equal(token_level_scores.offsets, kl.offsets):
        raise DataError("token_level_rewards: scores and KL differ in their rows")
    return Ragged((token_level_scores.values - coef * kl.values).astype(np.float32), kl.offsets)


REWARD_COLUMNS = ("rm_scores", "token_level_scores", "token_level_rewards")


def with_rewards(
    batch: TrajectoryBatch, scores: Sequence[Score] = (), kl: Ragged | None = None, coef: float = 0.0
) -> Batch:
    """`batch` with rm_scores, token_level_scores, token_level_rewards. An rm_scores column in it is used as it is."""
    rm_scores = batch.ragged["rm_scores"] if "rm_scores" in batch.ragged else place_scores(batch, scores)
    rewards = rm_scores if kl is None else token_level_rewards(rm_scores, kl, coef)
    return batch.union(Batch(dict(zip(REWARD_COLUMNS, (rm_scores, rm_scores, rewards), strict=True))))


def reward_extra_info(extras: Sequence[Mapping[str, object]]) -> dict[str, list]:
    """Everything that was reported: a list per key over all trajectories, None where one did not say.

    Its keys are the `reward_extra_keys`.
    """
    keys = dict.fromkeys(key for extra in extras for key in extra)
    return {key: [extra.get(key) for extra in extras] for key in keys}
