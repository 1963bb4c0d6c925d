"""Alarms: each begins where it should, says what to do, and is silent in a healthy run."""

import json

import pytest

from mempo_ray.config.schema import Alarms
from mempo_ray.observability.alarms import AlarmSink, find_alarms
from mempo_ray.observability.run_folder import RunFolder

SETTINGS = Alarms(window=4)
HEALTHY = [
    {
        "step": step,
        "reward/outcome_mean": 0.3 + 0.02 * step,
        "eval/em": 0.3 + 0.02 * step,
        "policy/kl_ref": 0.01,
        "group/flat_outcome_share": 0.4,
        "rollout/unscored_share": 0.0,
        "rollout/output_tokens_mean": 100 + step,
    }
    for step in range(10)
]


def changed(**values_by_step) -> list[dict]:
    """The healthy rows with other last values: {name: values of the last rows}."""
    rows = [dict(row) for row in HEALTHY]
    for name, values in values_by_step.items():
        for row, value in zip(rows[-len(values) :], values, strict=True):
            row[name] = value
    return rows


def test_a_healthy_run_is_silent():
    assert find_alarms(HEALTHY, SETTINGS) == {}
    assert find_alarms([], SETTINGS) == {}


@pytest.mark.parametrize(
    ("alarm", "name", "values"),
    [
        ("kl_runaway", "policy/kl_ref", [0.9]),
        ("flat_groups", "group/flat_outcome_share", [0.95] * 4),
        ("unscored", "rollout/unscored_share", [0.2]),
        ("length_drift", "rollout/output_tokens_mean", [350]),
        ("length_drift", "rollout/output_tokens_mean", [20]),
    ],
)
def test_one_bad_number_raises_one_alarm(alarm, name, values):
    assert list(find_alarms(changed(**{name: values}), SETTINGS)) == [alarm]


def test_reward_up_and_validation_down_is_reward_hacking():
    hacked = changed(**{"reward/outcome_mean": [0.3, 0.5, 0.6, 0.8], "eval/em": [0.5, 0.4, 0.3, 0.2]})
    assert "fell from 0.500 to 0.200" in find_alarms(hacked, SETTINGS)["reward_hacking"]
    both_up = changed(**{"reward/outcome_mean": [0.3, 0.5, 0.6, 0.8]})
    assert find_alarms(both_up, SETTINGS) == {}


def test_one_step_of_equal_scores_is_no_alarm():
    assert find_alarms(changed(**{"group/flat_outcome_share": [1.0, 1.0]}), SETTINGS) == {}


def test_an_alarm_is_said_when_it_begins_and_kept_in_the_run_folder(tmp_path):
    folder, said = RunFolder.create(tmp_path, "run"), []
    sink = AlarmSink(SETTINGS, folder, said.append)
    for step, kl in enumerate([0.1, 0.9, 0.9, 0.1, 0.9]):
        sink.log(step, {"policy/kl_ref": kl})
    assert [line.split(":")[0] for line in said] == ["ALARM kl_runaway at step 1", "ALARM kl_runaway at step 4"]
    logged = [json.loads(line) for line in (folder.root / "alarms.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [1, 4]


def test_a_resumed_run_remembers_and_a_step_done_again_counts_once(tmp_path):
    folder, said = RunFolder.create(tmp_path, "run"), []
    earlier = [{"step": step, "rollout/output_tokens_mean": 100.0} for step in range(5)]
    sink = AlarmSink(SETTINGS, folder, said.append, earlier)
    sink.log(5, {"rollout/output_tokens_mean": 300.0})
    sink.log(5, {"rollout/output_tokens_mean": 300.0})
    assert len(said) == 1
