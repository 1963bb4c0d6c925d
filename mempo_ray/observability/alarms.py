"""Signs that training goes wrong although every number looks fine by itself (R9).

    metrics of a step ──▶ AlarmSink ──▶ find_alarms(rows so far) ──▶ the run's display, alarms.jsonl

An alarm is said when it begins, and again only after it has been silent for a step. It never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mempo_ray.config.schema import Alarms
from mempo_ray.observability.run_folder import RunFolder

Row = Mapping[str, float]


def find_alarms(rows: Sequence[Row], settings: Alarms) -> dict[str, str]:
    """Alarm → what was seen, and what to look at; for the newest of `rows` (metrics by step, oldest first).

    reward_hacking  over the last `window` steps the outcome reward rose while held-out EM fell, both by `min_change`
    kl_runaway      KL to the reference, per token, above `max_kl`
    flat_groups     for `window` steps on end nearly all groups had equal scores: nothing to learn from
    unscored        scorers failed on more than `unscored_share` of the step's trajectories
    length_drift    output tokens a trajectory left [1/r, r] × their mean over the first `window` steps
    """
    found = {}
    window = settings.window
    reward, em = _series(rows[-window:], "reward/outcome_mean"), _series(rows[-window:], "eval/em")
    if len(em) > 1 and _rise(reward) > settings.min_change and em[-1] - em[0] < -settings.min_change:
        found["reward_hacking"] = (
            f"the outcome reward rose by {_rise(reward):.3f} while EM on held-out questions fell from {em[0]:.3f} to "
            f"{em[-1]:.3f}; look at the trajectories with the highest scores"
        )
    if (kl := _last(rows, "policy/kl_ref")) > settings.max_kl:
        found["kl_runaway"] = (
            f"KL to the reference is {kl:.3f} a token, alarms.max_kl is {settings.max_kl:g}; lower policy.lr, or raise "
            "algorithm.kl_coef"
        )
    flat = _series(rows[-window:], "group/flat_outcome_share")
    if len(flat) == window and flat.min() > settings.flat_share:
        found["flat_groups"] = (
            f"for {window} steps at least {flat.min():.0%} of the groups had equal scores; the tasks are too easy "
            "or too hard: see algorithm.group_filter"
        )
    if (share := _last(rows, "rollout/unscored_share")) > settings.unscored_share:
        found["unscored"] = f"{share:.0%} of the step's trajectories have no score; excluded.jsonl has the reasons"
    lengths = _series(rows, "rollout/output_tokens_mean")
    if len(lengths) > window:
        ratio = lengths[-1] / max(lengths[:window].mean(), 1e-9)
        if not 1 / settings.length_ratio <= ratio <= settings.length_ratio:
            found["length_drift"] = (
                f"trajectories have {ratio:.1f} times the output tokens that they had in the first {window} steps; "
                "look at what the policy writes, and at agent.limits"
            )
    return found


class AlarmSink:
    """A MetricSink that watches. `rows`: what a resumed run has logged so far, each with its `step`."""

    def __init__(self, settings: Alarms, folder: RunFolder, say: Callable[[str], None], rows: Sequence[Row] = ()):
        self._settings, self._folder, self._say = settings, folder, say
        self._rows = list(rows)
        self._sounding: frozenset[str] = frozenset()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        again = next((row for row in self._rows if row["step"] == step), {})  # an evaluation, or a step done again
        self._rows = [*(row for row in self._rows if row["step"] < step), {**again, "step": step, **values}]
        found = find_alarms(self._rows, self._settings)
        for name in sorted(found.keys() - self._sounding):
            self._say(f"ALARM {name} at step {step}: {found[name]}")
            self._folder.append_jsonl("alarms.jsonl", [{"step": step, "alarm": name, "text": found[name]}])
        self._sounding = frozenset(found)


def _series(rows: Sequence[Row], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows if key in row])


def _last(rows: Sequence[Row], key: str) -> float:
    return rows[-1].get(key, 0.0) if rows else 0.0


def _rise(values: np.ndarray) -> float:
    """Last third minus first third: a single step says nothing."""
    third = max(1, len(values) // 3)
    return float(values[-third:].mean() - values[:third].mean()) if len(values) > 1 else 0.0
