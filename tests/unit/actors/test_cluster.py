"""What Ray says at a start and a person need not read."""

from __future__ import annotations

import logging

import pytest
from ray._private.authentication import authentication_token_setup as of_ray

from mempo_ray.actors.cluster import TOKEN_LOGGER, is_worth_saying


@pytest.mark.parametrize(
    ("warn", "is_heard"), [("_warn_token_auth_enabled", False), ("_warn_token_auth_disabled", True)]
)
def test_of_ray_s_words_on_tokens_the_harmless_ones_are_left_out(warn: str, is_heard: bool, caplog):
    logger = logging.getLogger(TOKEN_LOGGER)
    logger.addFilter(is_worth_saying)
    try:
        with caplog.at_level(logging.WARNING):
            getattr(of_ray, warn)()
    finally:
        logger.removeFilter(is_worth_saying)
    assert bool(caplog.records) == is_heard
