"""Scorers, managers, and the contract from score to token."""
