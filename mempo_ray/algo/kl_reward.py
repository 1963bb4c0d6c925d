"""KL as part of the reward (`algorithm.kl_in_reward`, algorithm.md §5): a penalty on the score, without gradient."""

from __future__ import annotations

import numpy as np

from mempo_ray.config.schema import AdaptiveKL
from mempo_ray.contracts import LogProbRequest, LogProbResult, PayloadRef, Segment, Slice, TrajectorySummary
from mempo_ray.errors import TrainingError

MAX_ERROR = 0.2
"""One step of the controller moves κ by at most this share × n / horizon."""


def kl_request(
    summary: TrajectorySummary,
    payload: PayloadRef,
    *,
    model: str,
    policy_version: int | None,
    temperature: float,
    deadline_s: float,
    priority: int = 0,
) -> LogProbRequest:
    """Log-probs of every output token of a trajectory, each row behind the prompt that it was sampled from.

    Two of them make the penalty: `model` "live" for log π_old and "reference" for log π_ref. `temperature` is the
    sampling temperature, as everywhere in §5.
    """
    segments = []
    for row, (num_prompt, num_output) in enumerate(zip(summary.prompt_tokens_S, summary.output_tokens_S, strict=True)):
        segments.append(Segment(-1, Slice("prompt_ids", row), num_prompt))
        segments.append(Segment(len(segments) - 1, Slice("output_ids", row), num_output, (0, num_output)))
    return LogProbRequest(
        id=f"kl-{model}/{summary.task_id}/{summary.sibling}/{summary.attempt}",
        segments=tuple(segments),
        payload=payload,
        policy_version=policy_version,
        model=model,
        temperature=temperature,
        deadline_s=deadline_s,
        priority=priority,
        affinity=summary.task_id,
    )


def token_kl(old: LogProbResult, reference: LogProbResult) -> np.ndarray:
    """log π_old − log π_ref of each output token of the trajectory (k1), float64 [T]. The penalty is κ times its sum.

    End-of-turn tokens that the system added (`rollout.stop_at_tags`) are counted in: summaries do not tell them apart.

    Raises:
        TrainingError: the two answers differ in shape, or hold a log-prob that is not finite.
    """
    old_T, reference_T = np.concatenate(old.logprobs), np.concatenate(reference.logprobs)
    if old_T.shape != reference_T.shape:
        raise TrainingError(f"{old.id}: {old_T.size} log-probs of the policy, {reference_T.size} of the reference")
    kl_T = old_T.astype(np.float64) - reference_T
    if not np.isfinite(kl_T).all():
        raise TrainingError(f"{old.id}: non-finite log-prob in the KL penalty")
    return kl_T


def next_kl_coef(coef: float, kl: float, num_trajectories: int, settings: AdaptiveKL) -> float:
    """κ·(1 + clip(KL/target − 1, ±0.2)·n/horizon) (Ziegler et al. 2019, §2.2). κ is the controller's whole state.

    Args:
        kl: mean over the step's trajectories of their mean KL per output token.
    """
    error = float(np.clip(kl / settings.target - 1, -MAX_ERROR, MAX_ERROR))
    return coef * (1 + error * num_trajectories / settings.horizon)
