"""One MemPO episode, async, without ray or torch.

group ──EpisodeRequest──▶ episode ──▶ Trajectory
                            ├─ prompt     texts and stored ids → prompt ids
                            ├─ protocol   output bytes → blocks, spans, action, format verdict
                            ├─ memory     output → memory ids; task → probes
                            └─ tools/     action → passages
"""
