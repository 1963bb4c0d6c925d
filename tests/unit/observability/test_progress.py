"""What a person watches: stages, pace, time left; on a terminal and in a log file."""

from __future__ import annotations

import io
import re

from rich.console import Console

from mempo_ray.observability.progress import LiveDisplay, PlainDisplay, make_display

METRICS = {"reward/outcome_mean": 0.25, "eval/em": 0.5, "memory/p_mem": 0.125, "time/step_s": 20.0, "policy/loss": 1.0}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def plain(num_steps: int = 10) -> tuple[PlainDisplay, Clock, list]:
    clock, lines = Clock(), []
    return PlainDisplay(num_steps, lines.append, clock), clock, lines


def test_a_stage_is_one_line_and_then_one_every_ten_seconds_with_the_time_left():
    display, clock, lines = plain()
    display.stage("sampling", 100)
    for _ in range(50):
        clock.now += 0.5
        display.advance()
    assert lines == [
        "· sampling (100)",
        "  sampling: 20/100 0:40 left",
        "  sampling: 40/100 0:30 left",
    ]


def test_a_stage_of_unknown_length_says_so():
    display, clock, lines = plain()
    display.stage("searching")
    clock.now += 11
    display.advance(3)
    assert lines == ["· searching", "  searching: 3/? "]


def test_the_time_left_counts_from_the_first_step():
    display, clock, lines = plain()
    display.log(0, {"eval/em": 0.1})
    for step in (1, 2):
        clock.now += 20
        display.log(step, METRICS)
    assert lines[0].split("  ") == ["step 0/10", "EM 0.100", ""]
    assert lines[1].endswith("3:00 left")
    assert lines[2].endswith("2:40 left")


def test_after_a_resume_the_pace_is_that_of_this_process():
    display, clock, lines = plain()
    clock.now += 20
    display.log(8, METRICS)
    assert lines[0].startswith("step 8/10")
    assert lines[0].endswith("0:40 left")


def test_a_step_shows_the_metrics_that_people_look_at_and_no_others():
    display, _, lines = plain()
    display.log(1, METRICS)
    assert "reward 0.250  EM 0.500  P_mem 0.125  s/step 20.0" in lines[0]
    assert "loss" not in lines[0]


def test_without_a_terminal_there_are_plain_lines_and_no_control_codes():
    text = io.StringIO()
    display = make_display(2, Console(file=text, width=40))
    assert isinstance(display, PlainDisplay)
    display.stage("update")
    display.log(1, METRICS)
    display.say(path := "runs/" + "quickstart-[1]/" * 10)
    display.close()
    assert "\x1b" not in text.getvalue()
    assert path in text.getvalue().splitlines(), "a path was folded, or read as markup"


def test_on_a_terminal_the_panel_shows_stage_steps_and_numbers():
    text = io.StringIO()
    display = make_display(2, Console(file=text, width=200, force_terminal=True))
    assert isinstance(display, LiveDisplay)
    display.stage("update", 4)
    display.advance()
    display.log(1, METRICS)
    display.say("a word")
    display.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    for word in ("update", "1/2", "reward", "0.250", "a word"):
        assert word in shown
