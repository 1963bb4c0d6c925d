"""What every `ports.MetricSink` does: the fake, the metrics file, the plain display, and several at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mempo_ray.observability.metrics import Fanout, JsonlSink
from mempo_ray.observability.progress import PlainDisplay
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.ports import MetricSink
from tests.fakes.sinks import ListSink


@dataclass(frozen=True)
class Case:
    sink: MetricSink
    rows: Callable[[], list[str]]  # what a reader sees, a text for each `log`


@pytest.fixture(params=["fake", "jsonl", "plain display", "fanout"])
def case(request, tmp_path) -> Case:
    kept, lines, folder = ListSink(), [], RunFolder.create(tmp_path, "run")
    cases = {
        "fake": Case(kept, lambda: list(map(str, kept.rows))),
        "jsonl": Case(JsonlSink(folder), lambda: list(map(str, folder.read_metrics()))),
        "plain display": Case(PlainDisplay(9, lines.append), lambda: lines),
    }
    several = Fanout([case.sink for case in cases.values()])
    together = Case(several, lambda: ["".join(rows) for rows in zip(*(c.rows() for c in cases.values()), strict=True)])
    return {**cases, "fanout": together}[request.param]


def test_a_number_arrives_under_its_step_in_the_order_of_logging(case):
    for step, value in ((0, 0.125), (7, 0.5)):
        case.sink.log(step, {"reward/outcome_mean": value})
    first, second = case.rows()
    assert "0.125" in first
    assert "7" in second
    assert "0.5" in second


def test_any_name_and_no_name_will_do(case):
    case.sink.log(1, {})
    case.sink.log(2, {"somebody's/own_s": 1.0})
    assert len(case.rows()) == 2


def test_what_was_logged_stays_whatever_becomes_of_the_mapping(case):
    values = {"reward/outcome_mean": 0.125}
    case.sink.log(1, values)
    values.clear()
    assert "0.125" in case.rows()[0]


def test_the_mapping_is_left_as_it_was(case):
    values = {"eval/em": 0.5}
    case.sink.log(1, values)
    assert values == {"eval/em": 0.5}
