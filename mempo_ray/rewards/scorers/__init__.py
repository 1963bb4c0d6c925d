"""Scorers by data source."""
