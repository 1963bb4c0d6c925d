"""Retry-After as judges and sandboxes send it."""

from __future__ import annotations

import datetime
import email.utils

import pytest

from mempo_ray.retry_after import retry_after_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("", None),
        ("²", None),
        ("soon", None),
        ("Fri, 01 Jan 2021 00:00:00 GMT", 0.0),
        ("Fri, 01 Jan 2021 00:00:00 -0000", 0.0),
    ],
)
def test_retry_after_names_seconds_or_a_date(header, seconds):
    assert retry_after_s(header) == seconds


def test_a_date_is_as_far_away_as_it_is():
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=120)
    assert retry_after_s(email.utils.format_datetime(soon, usegmt=True)) == pytest.approx(120, abs=10)
