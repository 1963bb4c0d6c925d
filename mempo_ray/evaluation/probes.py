"""Do P_mem and P_full mean anything? Measured after the cold start, on held-out oracle trajectories.

p_mem_ratio   mean P(answer | last memory) / mean P(answer | the same memory with its needed fact replaced)
p_full_ratio  mean P(answer | full history) / mean P(answer | question)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mempo_ray.contracts import LogProbRequest, Probe, Segment
from mempo_ray.ports import LogProbs


@dataclass(frozen=True, eq=False)
class ProbeContexts:
    """The four contexts of one trajectory, int32 ids each, and the probe behind all of them."""

    task_id: str
    memory: np.ndarray
    foreign_memory: np.ndarray
    history: np.ndarray
    question: np.ndarray
    probe: Probe


async def probe_ratios(contexts: Sequence[ProbeContexts], logprobs: LogProbs, deadline_s: float) -> dict[str, float]:
    """Ratios of mean probabilities (geometric mean over answer tokens, algorithm.md §3) over the trajectories.

    `num_probe_trajectories` says over how many; {} where there are none, since nothing was measured.
    """
    if not contexts:
        return {}
    results = await asyncio.gather(*(logprobs(_request(c, deadline_s)) for c in contexts))
    p = np.array([[np.exp(np.mean(values, dtype=np.float64)) for values in result.logprobs] for result in results])
    memory, foreign, history, question = p.mean(axis=0)
    return {
        "p_mem_ratio": float(memory / foreign),
        "p_full_ratio": float(history / question),
        "p_mem_oracle": float(memory),
        "p_full_oracle": float(history),
        "num_probe_trajectories": float(len(contexts)),
    }


def _request(c: ProbeContexts, deadline_s: float) -> LogProbRequest:
    segments: list[Segment] = []
    for ids in (c.memory, c.foreign_memory, c.history, c.question):
        segments.append(Segment(-1, tuple(map(int, ids)), len(ids)))
        targets = (c.probe.start, c.probe.stop)
        segments.append(Segment(len(segments) - 1, c.probe.ids, len(c.probe.ids), targets))
    return LogProbRequest(f"probe/{c.task_id}", tuple(segments), deadline_s=deadline_s)
