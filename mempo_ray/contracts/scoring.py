"""Scores, and requests for log-probs.

A `LogProbRequest` is a forest: segments of token ids, each attached behind a parent, some with marked target
tokens. One request holds all contexts of one trajectory (algorithm.md §3); equal prefixes are stated once, so
a runner may compute them once (trunk and probe) or expand the forest to plain sequences.

    Example: initial prompt p, outputs o1 o2, tool text x1, memories m1 m2, probe a:

        0 p ──┬─ 1 a*          (P_full of turn 1)
              ├─ 2 o1 ─ 3 x1 ─ 4 a*   (P_full of turn 2)
              ├─ 5 m1 ─ 6 a*   (P_mem of turn 1)
              └─ 7 m2 ─ 8 a*   (P_mem of turn 2)          * marked
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mempo_ray.contracts.trajectory import PayloadRef

PART = "part/"
"""Before the names of a hybrid reward's parts in `Scored.extra`, which hold their scores before the weights."""


@dataclass(frozen=True)
class Scored:
    """The score of one trajectory, and anything its scorer wants to report (numbers, texts, booleans)."""

    score: float
    extra: Mapping[str, object] = field(default_factory=dict)
    process_scores: tuple[float, ...] | None = None  # one per turn

    @property
    def parts(self) -> dict[str, float]:
        """Parts of a hybrid reward by name; empty for any other."""
        numbers = {k: v for k, v in self.extra.items() if isinstance(v, bool | int | float)}
        return {k.removeprefix(PART): float(v) for k, v in numbers.items() if k.startswith(PART)}


@dataclass(frozen=True)
class Unscored:
    """No score, and why. Never a zero. kind: timeout | scorer_error | data | infrastructure."""

    reason: str
    kind: str


Score = Scored | Unscored


@dataclass(frozen=True)
class Slice:
    """`payload.ragged[column][row][start:stop]` of the request's payload."""

    column: str
    row: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Segment:
    """`length` token ids behind segment `parent` (-1: a root). `targets` = (start, stop) within the segment."""

    parent: int
    ids: tuple[int, ...] | Slice
    length: int
    targets: tuple[int, int] | None = None


@dataclass(frozen=True)
class LogProbRequest:
    """Log-probs (temperature `temperature`) of the marked tokens of a forest. A parent precedes its children.

    `policy_version` None = whatever the scorer holds when it serves; a number must match or the item fails.
    `model`: live | reference. `deadline_s`: seconds from submission. Requests of one `affinity` begin with the same
    tokens (siblings of a task): served together, their common prefix is computed once.
    """

    id: str
    segments: tuple[Segment, ...]
    payload: PayloadRef | None = None
    policy_version: int | None = None
    model: str = "live"
    temperature: float = 1.0
    deadline_s: float = 600.0
    priority: int = 0  # lower is served first
    affinity: str = ""  # "": shares with nobody

    def path(self, index: int) -> tuple[int, ...]:
        """Segments from the root to `index`, inclusive."""
        chain = [index]
        while (parent := self.segments[chain[-1]].parent) >= 0:
            chain.append(parent)
        return tuple(reversed(chain))

    @property
    def marked(self) -> tuple[int, ...]:
        return tuple(i for i, s in enumerate(self.segments) if s.targets is not None)

    @property
    def num_plain_tokens(self) -> int:
        """Tokens when each marked segment is run as a sequence of its own."""
        return sum(self.segments[i].length for marked in self.marked for i in self.path(marked))

    @property
    def num_forest_tokens(self) -> int:
        """Tokens when every segment is run once."""
        return sum(s.length for s in self.segments)


@dataclass(frozen=True, eq=False)
class LogProbResult:
    """float32 log-probs for each marked segment, in the order of `LogProbRequest.marked`, and who computed them."""

    id: str
    version: int
    logprobs: tuple[np.ndarray, ...]
