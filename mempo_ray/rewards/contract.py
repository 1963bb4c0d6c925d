"""From a scorer's answer to rewards on tokens; the trainer knows nothing of where a score came from.

    scorer ──▶ Scored | Unscored ──▶ rm_scores ──▶ token_level_scores ──(− κ·KL)──▶ token_level_rewards
                                 └─▶ reward_extra_info

The columns are named as verl's users know them. They are ragged float32, shaped like `output_ids`: one row a turn.
An `Unscored` trajectory has no row here: it was excluded before, it is never a zero.

A run uses `as_score`: every manager's answer passes through it. The columns are the contract for reward managers that
write token-level scores themselves; tests pin it. The driver reads the scalar outcome and does not build them yet.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence

import numpy as np

from mempo_ray.contracts import Batch, Ragged, Score, Scored, TrajectoryBatch, Unscored
from mempo_ray.errors import DataError


def as_score(value: object) -> Score:
    """What a scorer returned, as a value that cannot be mistaken: a finite number is a score, all else is not one.

    Example:
        >>> as_score({"score": 1, "em": True})
        Scored(score=1.0, extra={'em': True}, process_scores=None)
        >>> as_score(float("nan"))
        Unscored(reason='score is nan', kind='scorer_error')
    """
    if isinstance(value, Unscored):
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            return Unscored(f"dict without 'score': {sorted(map(str, value))}", "scorer_error")
        number, extra = value["score"], {str(k): v for k, v in value.items() if k != "score"}
    elif isinstance(value, Scored):
        number, extra = value.score, value.extra
    else:
        number, extra = value, {}
    if not isinstance(number, numbers.Real | np.bool_):
        return Unscored(f"score is a {type(number).__name__}, not a number", "scorer_error")
    if not math.isfinite(number):
        return Unscored(f"score is {float(number)}", "scorer_error")
    return Scored(float(number), extra, value.process_scores if isinstance(value, Scored) else None)


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
    """rm_scores: each trajectory's score on its last policy token, 0 on every other token.

    Args:
        scores: one per trajectory of the batch, in order.

    Raises:
        DataError: a trajectory is unscored, or the numbers of scores and trajectories differ.

    Example: two turns with output masks [1, 1], [1, 1, 0] and score 0.5 give [0, 0], [0, 0.5, 0].
    """
    mask = batch.ragged["output_mask"]
    starts = [*np.flatnonzero(batch.fixed["turn"] == 0).tolist(), len(batch)]
    if len(starts) - 1 != len(scores):
        raise DataError(f"{len(scores)} scores for {len(starts) - 1} trajectories")
    values = np.zeros(len(mask.values), np.float32)
    for (start, stop), score in zip(itertools.pairwise(starts), scores, strict=True):
        if isinstance(score, Unscored):
            raise DataError(f"an unscored trajectory has no token-level score ({score.kind}: {score.reason})")
        turn, token = last_policy_token([mask[row] for row in range(start, stop)])
        values[mask.offsets[start + turn] + token] = score.score
    return Ragged(values, mask.offsets)


def token_level_rewards(token_level_scores: Ragged, kl: Ragged, coef: float) -> Ragged:
    """token_level_scores − κ·KL, per token (algorithm.md §5, `kl_in_reward`). `kl` is log π_old − log π_ref."""
    if not np.array_equal(token_level_scores.offsets, kl.offsets):
        raise DataError("token_level_rewards: scores and KL differ in their rows")
    return Ragged((token_level_scores.values - coef * kl.values).astype(np.float32), kl.offsets)


def with_rewards(
    batch: TrajectoryBatch, scores: Sequence[Score] = (), kl: Ragged | None = None, coef: float = 0.0
) -> Batch:
    """`batch` with rm_scores, token_level_scores, token_level_rewards. An rm_scores column in it is used as it is."""
    rm_scores = batch.ragged["rm_scores"] if "rm_scores" in batch.ragged else place_scores(batch, scores)
    rewards = rm_scores if kl is None else token_level_rewards(rm_scores, kl, coef)
    columns = {"rm_scores": rm_scores, "token_level_scores": rm_scores, "token_level_rewards": rewards}
    return batch.union(Batch(columns))


def reward_extra_info(scores: Sequence[Score]) -> dict[str, list]:
    """Everything the scorers reported: a list per key over all trajectories, None where one did not say."""
    extras = [score.extra if isinstance(score, Scored) else {} for score in scores]
    keys = dict.fromkeys(key for extra in extras for key in extra)
    return {key: [extra.get(key) for extra in extras] for key in keys}
