"""Reward managers by name."""
