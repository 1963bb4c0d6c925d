"""The Ray border: one file a box; plain class first, remote form on the last lines."""
