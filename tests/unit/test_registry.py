"""Registries: a name belongs to one piece, and a wrong name is told the right ones."""

import pytest

from mempo_ray.errors import ConfigError
from mempo_ray.registry import Registry


def one(): ...


def two(): ...


def test_a_registered_piece_is_found_by_name():
    registry = Registry("reward.scorer")
    assert registry.register("one")(one) is one
    assert registry.get("one") is one
    assert registry.names == ("one",)


def test_a_second_registration_shows_both_places():
    registry = Registry("reward.scorer")
    registry.register("one")(one)
    registry.register("one")(one)  # the same module imported again is no conflict
    with pytest.raises(ConfigError, match=r"'one' is registered twice, at .*test_registry.py:\d+ and at .*:\d+"):
        registry.register("one")(two)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    registry = Registry("reward.scorer")
    registry.register("mempo")(one)
    registry.register("math")(two)
    said = r"reward.scorer: unknown name 'memppo'; did you mean 'mempo'\? \(known: math, mempo\)$"
    with pytest.raises(ConfigError, match=said):
        registry.get("memppo")


def test_a_path_is_imported_when_it_is_first_used():
    registry = Registry("x")
    registry.register_path("sqrt", "math:sqrt")
    registry.check("sqrt")
    assert registry.get("sqrt")(9) == 3
