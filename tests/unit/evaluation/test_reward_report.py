"""The report of `mempo-ray reward-check`: what it counts, and whom it shows."""

import io
import json

import pytest
from rich.console import Console

from mempo_ray.contracts import Score, Scored, Unscored
from mempo_ray.evaluation.reward_report import Checked, RewardReport


def checked(score: float | Score, name: str = "q", seconds: float = 0.01, failed: tuple[str, ...] = ()) -> Checked:
    score = Scored(score) if isinstance(score, float) else score
    return Checked(name, "hotpotqa", f"<answer>[bold]{name}</answer>", "Paris", score, seconds, failed)


MIXED = RewardReport(
    (
        checked(1.0, "best", seconds=0.5),
        checked(0.0, "worst", failed=("mem_paired", "think_present")),
        checked(0.5, "middle", failed=("mem_paired",)),
        checked(Unscored("slow", "timeout"), "late"),
    )
)


def test_unscored_responses_are_counted_and_in_no_mean():
    assert MIXED.mean == pytest.approx(0.5)
    assert MIXED.unscored() == {"timeout: slow": 1}
    assert MIXED.failures().most_common(1) == [("mem_paired", 2)]
    counts, borders = MIXED.histogram()
    assert (counts.sum(), borders[0], borders[-1]) == (3, 0, 1)


def test_scores_outside_of_zero_to_one_widen_the_histogram():
    _, borders = RewardReport((checked(-1.0), checked(3.0))).histogram()
    assert (borders[0], borders[-1]) == (-1, 3)


def test_latency_percentiles():
    report = RewardReport(tuple(checked(1.0, seconds=s / 100) for s in range(101)))
    assert report.latency_s() == pytest.approx({"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0})


def test_no_example_is_shown_twice():
    best, worst = MIXED.best_and_worst()
    assert [c.task_id for c in best] == ["best"]
    assert [c.task_id for c in worst] == ["worst"]
    alone_best, alone_worst = RewardReport((checked(1.0),)).best_and_worst()
    assert (len(alone_best), len(alone_worst)) == (1, 0)


def test_siblings_are_one_example():
    siblings = [checked(score, task) for task, score in (("a", 1.0), ("b", 0.7), ("c", 0.0)) for _ in range(8)]
    best, worst = RewardReport(tuple(siblings)).best_and_worst()
    assert ([c.task_id for c in best], [c.task_id for c in worst]) == (["a", "b", "c"], ["c", "b", "a"])


def test_where_nothing_has_a_score_only_the_reasons_are_shown():
    console = Console(file=io.StringIO(), width=100)
    console.print(RewardReport((checked(Unscored("slow", "timeout")),)).show())
    shown = console.file.getvalue()
    assert ("0 of 1 responses scored" in shown, "timeout: slow" in shown) == (True, True)
    assert ("nan" in shown, "0.00 – 0.10" in shown) == (False, False)


def test_an_expected_baseline_within_chance_is_no_problem():
    many = RewardReport(tuple(checked(float(i % 2)) for i in range(100)))
    assert many.disagrees_with(0.55) is None
    assert "expected 0.900" in many.disagrees_with(0.9)
    assert RewardReport(()).disagrees_with(0.5) is not None


def test_the_report_is_shown_with_its_tags_as_they_are_and_drawn(tmp_path):
    console = Console(file=io.StringIO(), width=120)
    console.print(MIXED.show())
    shown = console.file.getvalue()
    assert "3 of 4 responses scored" in shown
    assert "<answer>[bold]best</answer>" in shown
    MIXED.draw(tmp_path / "histogram.png")
    assert (tmp_path / "histogram.png").stat().st_size > 1000
    assert json.loads(MIXED.to_json())["failures"] == {"mem_paired": 2, "think_present": 1}


def test_nothing_scored_is_still_a_report(tmp_path):
    empty = RewardReport((checked(Unscored("no key", "data")),))
    Console(file=io.StringIO()).print(empty.show())
    empty.draw(tmp_path / "empty.png")
    assert json.loads(empty.to_json(), parse_constant=pytest.fail)["mean"] is None
