"""Where a step's time went, which pool limits it, and what to change: a verdict from the numbers of one step. Pure.

    time/step_s = generation + tools + scoring + reward + update + sync + other      (what they are: STAGES)

Sampling ends with the last episode. Its wall time is split between `generation` and `tools` as the episodes' own waits
are. What scoring and rewards take beside it costs nothing; what they take after it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STAGES = {
    "generation": "until the last episode ended, as far as episodes waited for turns",
    "tools": "until the last episode ended, as far as episodes waited for tools",
    "scoring": "from there to the last log-prob",
    "reward": "from there to the last outcome",
    "update": "the update",
    "sync": "the weight sync",
    "other": "the rest",
}
"""Stage → which part of a step it is."""

MANY = 0.5
"""Share from which one cause is called the main one."""

SHORT_S = 3.0
"""A step that took less is bound by what no key changes: calls, the first turn, the start of an update."""

Values = Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """Shares of the step by stage (they add up to 1), the stage that took most, and how to make it shorter."""

    shares: Mapping[str, float]
    stage: str
    pool: str
    advice: str  # names the keys

    @property
    def metrics(self) -> dict[str, float]:
        """`bottleneck/<stage>_share`."""
        return {f"bottleneck/{stage}_share": share for stage, share in self.shares.items()}

    def __str__(self) -> str:
        return f"{self.stage} took {self.shares[self.stage]:.0%} of the step ({self.pool}): {self.advice}"


def find_bottleneck(values: Values) -> Verdict | None:
    """The verdict on a step from what was logged for it; None where it was no step (the start, the last evaluation).

    Example: 10 s, of them 6 until the last episode ended and 3 for the update; episodes never waited for a tool.
        >>> print(find_bottleneck({"time/step_s": 10.0, "time/generation_s": 6.0, "time/update_s": 3.0}))
        generation took 60% of the step (rollout engines): raise rollout.replicas
    """
    step_s = values.get("time/step_s", 0.0)
    if step_s <= 0 or "time/generation_s" not in values:
        return None
    seconds = _seconds(values)
    total_s = max(step_s, sum(seconds.values()))
    shares = {stage: stage_s / total_s for stage, stage_s in seconds.items()}
    shares["other"] = 1 - sum(shares.values())
    stage = max(STAGES, key=lambda name: shares[name])
    return Verdict(shares, stage, *_remedy(stage, values))


def bound_by(values: Values) -> str:
    """The verdict as a line for people; "" where there is none, or a step under SHORT_S, where no advice is good."""
    verdict = find_bottleneck(values)
    return "" if verdict is None or values["time/step_s"] < SHORT_S else f"bound by: {verdict}"


def _seconds(values: Values) -> dict[str, float]:
    """Of each stage but `other`."""
    turns_s, tools_s = values.get("rollout/turn_wait_s", 0.0), values.get("rollout/tool_wait_s", 0.0)
    tool_share = tools_s / (turns_s + tools_s) if tools_s > 0 else 0.0
    return {
        "generation": values["time/generation_s"] * (1 - tool_share),
        "tools": values["time/generation_s"] * tool_share,
        "scoring": values.get("scoring/exposed_s", 0.0),
        "reward": values.get("reward/exposed_s", 0.0),
        "update": values.get("time/update_s", 0.0),
        "sync": values.get("time/sync_s", 0.0),
    }


def _remedy(stage: str, values: Values) -> tuple[str, str]:
    """The pool that a stage waits for, and what to change."""
    match stage:
        case "generation":
            return "rollout engines", "raise rollout.replicas"
        case "tools" if "retrieval/busy_s" not in values:
            return "tools", "look at the server of retrieval.url, or at the tools of agent.tools"
        case "tools" if (
            values["retrieval/busy_s"] < MANY * values["retrieval/num_replicas"] * values["time/generation_s"]
        ):
            return "retrieval", "replicas are idle most of the time: lower retrieval.max_wait_s"
        case "tools" if values["retrieval/encode_share"] > MANY:
            return "retrieval", "encoding is most of it: retrieval.device=cuda, or raise retrieval.replicas"
        case "tools":
            return "retrieval", "raise retrieval.replicas, or retrieval.cache_entries"
        case "scoring" if "scoring/engine_busy_s" in values:
            return "engines that score", "raise rollout.replicas, or set memory_reward.scorer_engine=policy"
        case "scoring":
            return "policy ranks", "raise policy.ranks, or set memory_reward.scorer_engine=vllm"
        case "reward":
            return "reward workers", "raise reward.workers or reward.processes"
        case "update":
            return "policy ranks", "raise policy.ranks, or policy.micro_batch_tokens where memory allows"
        case "sync":
            return "weight transport", "see weight_sync.transport"
    return "driver", "see time/… in metrics.jsonl"
