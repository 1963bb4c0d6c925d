"""HTTP's Retry-After (RFC 9110, 10.2.3), which judges, sandboxes and retrieval servers answer when they are busy."""

from __future__ import annotations

import datetime
import email.utils


def retry_after_s(header: str) -> float | None:
    """Seconds of a Retry-After header, which names seconds or a date; None where it names neither."""
    if header.strip().isdecimal():
        return float(header)
    try:
        until = email.utils.parsedate_to_datetime(header)
    except (ValueError, TypeError):
        return None
    if until.tzinfo is None:  # "-0000": a time in UTC of an unknown zone (RFC 5322)
        until = until.replace(tzinfo=datetime.UTC)
    return max(0.0, (until - datetime.datetime.now(datetime.UTC)).total_seconds())
