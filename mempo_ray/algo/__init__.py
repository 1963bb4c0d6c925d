"""The algorithm's equations as pure functions."""
