"""Tasks: files, the synthetic world, oracles."""
