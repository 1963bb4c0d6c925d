"""`Runner`: what micro-batches are cut for. The scheduler decides, the runner obeys.

A reward model is a Runner. The FSDP gang is a `Gang`: a Runner that also obeys commands, in the same one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mempo_ray.batching.packing import RankShare
from mempo_ray.contracts import CommandReply, LogProbRequest, LogProbResult
from mempo_ray.errors import MempoError

T = TypeVar("T")
RequestT = TypeVar("RequestT", contravariant=True)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Ran(Generic[T]):
    """One micro-batch: a result, or what was wrong with it, for each request, in order; and the tokens it took.

    Example: a runner that pads requests of 3 and 5 tokens: Ran([a, b], num_tokens=10, num_padded_tokens=2).
    """

    results: Sequence[T | MempoError]
    num_tokens: int  # computed in all
    num_padded_tokens: int  # of these, computed for nobody: padding and dummy passes


class Runner(Protocol[RequestT, ResultT]):
    """Runs one micro-batch at a time. `pads`: to its longest request; else tokens lie behind one another."""

    pads: bool

    def cost(self, request: RequestT) -> int:
        """Tokens of the request without padding; at least 1."""
        ...

    async def run(self, requests: Sequence[RequestT]) -> Ran[ResultT]:
        """One bad item fails nobody else: its error stands in its place.

        Raises:
            MempoError: nothing can run here any more, the runner is spent.
        """
        ...


class Gang(Runner[LogProbRequest, LogProbResult], Protocol):
    """All FSDP ranks as one: they see the same commands in the same order."""

    num_ranks: int
    version: int  # of the weights that the next micro-batch meets

    async def execute(self, shares: Sequence[RankShare]) -> list[CommandReply]:
        """One command, a share for each rank; the replies by rank.

        Raises:
            MempoError: a rank died, refused or missed the deadline. All ranks have been ended, the gang is spent.
        """
        ...
