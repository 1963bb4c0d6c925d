"""Sources of scores beside rules: a judge behind HTTP, a reward model."""
