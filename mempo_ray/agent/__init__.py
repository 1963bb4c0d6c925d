"""One MemPO episode, async, without ray or torch.

tokenizer  prompt ──▶ episode ──▶ Trajectory          group: which episodes, and which of them again
             protocol ─┘ └─ memory, tools
"""
