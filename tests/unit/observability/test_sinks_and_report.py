"""Where numbers go, and the picture at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from mempo_ray.errors import ConfigError
from mempo_ray.observability.metrics import Fanout, JsonlSink, TrackerSink
from mempo_ray.observability.report import ROWS, draw_learning_curve, summary_table
from mempo_ray.observability.resources import MemoryMonitor
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.observability.timing import StageTimer
from tests.fakes.sinks import ListSink


def test_every_sink_gets_the_same_numbers(tmp_path):
    folder, other = RunFolder.create(tmp_path, "run"), ListSink()
    Fanout([JsonlSink(folder), other]).log(3, {"reward/outcome_mean": 0.5})
    assert folder.read_metrics() == [{"step": 3, "reward/outcome_mean": 0.5}]
    assert other.rows == [(3, {"reward/outcome_mean": 0.5})]


def test_an_unknown_tracker_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"trackers: unknown \['nosuch'\].*tensorboard"):
        TrackerSink(["nosuch"], "run", tmp_path, {})


def test_stages_add_up_until_they_are_taken():
    ticks = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0])
    timer = StageTimer(clock=lambda: next(ticks))
    for name in ("sync", "sync", "save"):
        with timer.stage(name):
            pass
    assert timer.take() == {"time/sync_s": 5.0, "time/save_s": 1.0}
    assert timer.take() == {}


def test_a_stage_that_fails_is_timed_too():
    ticks = iter([0.0, 4.0])
    timer = StageTimer(clock=lambda: next(ticks))
    with pytest.raises(ValueError, match="inside"), timer.stage("step"):
        raise ValueError("inside")
    assert timer.take() == {"time/step_s": 4.0}


@pytest.mark.parametrize(
    "metrics",
    [[], [{"step": 0, "eval/em": 0.1}], [{"step": s, "eval/em": 0.1 * s, "memory/p_mem": 0.2} for s in range(15)]],
    ids=["nothing", "one point", "a curve"],
)
def test_the_learning_curve_is_a_picture_whatever_was_logged(metrics, tmp_path: Path):
    draw_learning_curve(metrics, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_is_a_short_table_that_says_where_to_look(tmp_path: Path):
    console = Console(record=True, width=40, file=(tmp_path / "out").open("w"))
    root = Path("/data/runs/of/the/whole/team/quick-1")
    console.print(summary_table({"em_final": 0.123456, "scoring_busy_s": 3.0, "nested": {"a": 1}}, root))
    text = console.export_text()
    assert "12.3%" in text
    shown = "".join(line.split("│")[2].strip() for line in text.splitlines() if line.count("│") == 3)
    assert f"{root}/" in shown  # nothing of the path is cut
    assert not any(name in text for name in ("nested", "busy", "gain"))  # internals, and what was not measured


def test_the_rows_of_the_summary_say_in_words_what_the_numbers_are(tmp_path: Path):
    summary = {
        "steps": 20, "seconds": 182.4, "em_cold_start": 0.31, "em_final": 0.62, "em_gain": 0.31, "em_gain_low": 0.24,
        "em_gain_high": 0.38, "num_questions": 200, "f1_final": 0.64, "em_memory_swapped": 0.05, "p_mem_ratio": 421.5,
        "p_full_ratio": 380.0, "total_tokens_mean": 1234.5, "peak_tokens_mean": 210.0, "scoring_hidden_share": 0.873,
        "scoring_exposed_s": 4.25, "peak_pss_gb": 4.1, "drift_turns": 0, "max_logprob_gap": 0.01,
    }  # fmt: skip
    table = summary_table(summary, tmp_path)
    assert table.row_count == len(ROWS) + 1
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    console.print(table)
    text = console.export_text()
    for said in (
        "20, in 182 s", "+31.0%, 95 % interval +24.0% to +38.0% (200 questions)", "answer 421.5 times likelier",
        "87% of its time lay beside generation (hidden_share)", "4.2 s in all (exposed_s)",
    ):  # fmt: skip
        assert said in text
    assert "drift" not in text


def test_a_stage_has_the_largest_memory_in_use_while_it_was_open():
    now, use = iter(range(100)), iter([1.0, 2.0, 5.0, 3.0])
    timer = StageTimer(clock=lambda: float(next(now)), take_gb=lambda: next(use))
    with timer.stage("step"), timer.stage("update"):
        pass
    assert {k: v for k, v in timer.take().items() if k.startswith("ram/")} == {"ram/step_gb": 5.0, "ram/update_gb": 5.0}


def test_the_memory_monitor_forgets_what_was_taken_but_not_the_peak():
    use = iter([1.0, 4.0, 2.0])
    monitor = MemoryMonitor(read_gb=lambda: next(use))
    for _ in range(3):
        monitor.sample()
    assert (monitor.take_gb(), monitor.take_gb(), monitor.peak_gb) == (4.0, 2.0, 4.0)
