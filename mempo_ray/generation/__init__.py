"""Rollout engines behind one Protocol."""
