"""Ray-native training of search agents that manage their own memory (MemPO, arXiv 2603.00680)."""
