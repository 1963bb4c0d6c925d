"""Batching decisions: a pure state machine; the clock is passed in."""
