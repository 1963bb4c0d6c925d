"""Where the next turn goes."""

from __future__ import annotations

import pytest

from mempo_ray.batching.routing import choose_engine


@pytest.mark.parametrize(
    ("loads", "last", "slack", "chosen"),
    [
        pytest.param({}, None, 100, None, id="no serving engine, no choice"),
        pytest.param({"a": 5, "b": 3}, None, 100, "b", id="a new group goes to the least loaded"),
        pytest.param({"b": 3, "a": 3}, None, 100, "a", id="ties go by name"),
        pytest.param({"a": 90, "b": 0}, "a", 100, "a", id="a group stays while its engine is within the slack"),
        pytest.param({"a": 100, "b": 0}, "a", 100, "a", id="the slack itself is still within"),
        pytest.param({"a": 101, "b": 0}, "a", 100, "b", id="above the slack it moves"),
        pytest.param({"b": 7, "c": 9}, "a", 100, "b", id="a group whose engine is gone moves"),
        pytest.param({"a": 5, "b": 3}, "a", 0, "b", id="no slack means plain least loaded"),
    ],
)
def test_choice(loads: dict[str, int], last: str | None, slack: int, chosen: str | None):
    affinity = {} if last is None else {"q1": last}
    assert choose_engine(loads, "q1", affinity, slack) == chosen


def test_load_stays_even_when_every_group_is_new():
    loads = {"a": 0, "b": 0, "c": 0}
    for number in range(30):
        loads[choose_engine(loads, f"q{number}", {})] += 100
    assert set(loads.values()) == {1000}
