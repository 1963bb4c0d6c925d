"""The two pieces of the memory reward that only a tokenizer can make: a turn's memory ids and a task's probes (§3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mempo_ray.agent.protocol import ParsedTurn
from mempo_ray.contracts import Probe, Task
from mempo_ray.ports import Tokenizer

ProbeTexts = Callable[[Task], Sequence[tuple[str, int]]]
"""A task's gold texts to score and the objective that each belongs to (`algo.memory_reward.plan_probes`)."""


def memory_ids(output_ids: np.ndarray, turn: ParsedTurn, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Ids of the turn's `<mem>` block, int32 [M], and how many border tokens were encoded again.

    A token that straddles a border of the block (Qwen2.5: `</mem><answer>` holds `><`) is replaced by its part inside.
    Empty where the turn has not exactly one well-formed block.

    Example: tokens ["<mem>a</", "mem", "><"] give the ids of the first two and those of ">", and 1.
    """
    block = turn.block("mem")
    if block is None:
        return np.empty(0, np.int32), 0
    start, stop = turn.token_span(block)
    borders = (*turn.starts_T, len(turn.text))
    head = turn.text[block.start : borders[start]]  # of a token that began before the block
    cut = borders[stop] > block.stop
    tail = turn.text[borders[stop - 1] : block.stop] if cut else b""
    try:
        again = [tokenizer.encode(part.decode()) for part in (head, tail)]
    except UnicodeDecodeError:  # the part inside begins within a character: there are no ids for it
        return np.empty(0, np.int32), 0
    ids = [*again[0], *output_ids[start : stop - cut].tolist(), *again[1]]
    return np.asarray(ids, np.int32), bool(head) + bool(tail)


def encode_probe(prefix: str, gold: str, suffix: str, tokenizer: Tokenizer, objective: int = 0) -> Probe:
    """The probe, encoded once as one string. Targets are the tokens that hold at least one byte of the gold text.

    Example: "<answer>Sari</answer>" as [<answer>, ▁Sari, </answer>] has targets [1, 2).
    """
    ids, offsets = tokenizer.encode_with_offsets(prefix + gold + suffix)
    start, stop = len(prefix.encode()), len((prefix + gold).encode())
    targets = [n for n, (first, last) in enumerate(offsets) if first < stop and last > start]
    first, last = (targets[0], targets[-1] + 1) if targets else (0, 0)
    return Probe(tuple(ids), first, last, objective)


def joined_probe(task: Task) -> Sequence[tuple[str, int]]:
    """The default of §3: primary answers, several objectives joined with '; '."""
    return [(task.gold_text, 0)]


def swapped_memories(memories_PS: Sequence[Sequence[Sequence[int]]]) -> list[tuple[tuple[int, ...], ...]]:
    """For each question the memories of another one: the next in the list that wrote any, of the same turn.

    Does the answer depend on the memory? An evaluation that forces these (`EpisodeRequest.forced_memory_S`) tells.
    Beyond the other question's turns its last memory stands; before its first valid one, that.
    A list with one writer or none has nothing to swap: the tuple is empty there.
    """
    written = [[tuple(map(int, ids)) for ids in memories if len(ids)] for memories in memories_PS]
    by_turn = [
        tuple(tuple(map(int, ids)) if len(ids) else _nearest(memories, turn) for turn, ids in enumerate(memories))
        if written[p]
        else ()
        for p, memories in enumerate(memories_PS)
    ]
    writers = [p for p, own in enumerate(written) if own]
    if len(writers) < 2:
        return [() for _ in memories_PS]
    donors = [next((w for w in writers if w > p), writers[0]) for p in range(len(memories_PS))]
    return [by_turn[donor] for donor in donors]


def _nearest(memories: Sequence[Sequence[int]], turn: int) -> tuple[int, ...]:
    """The last valid memory before `turn`, else the first after it."""
    valid = [n for n, ids in enumerate(memories) if len(ids)]
    at = max((n for n in valid if n < turn), default=valid[0])
    return tuple(map(int, memories[at]))
