"""One MemPO episode, async, without ray or torch."""
