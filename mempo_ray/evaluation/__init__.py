"""EM, F1, total and peak tokens; memory ablations."""
