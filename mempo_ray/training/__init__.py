"""One FSDP rank as plain torch, runnable without Ray."""
