"""`Runner`: what the BatchExecutor batches for. The scheduler decides, the runner obeys.

A reward model is a Runner. The FSDP gang is a `Gang`: a Runner that also obeys commands, in the same one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from mempo_ray.batching.packing import RankShare
from mempo_ray.contracts import CommandReply, LogProbRequest, LogProbResult
from mempo_ray.errors import MempoError

RequestT = TypeVar("RequestT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)


class Runner(Protocol[RequestT, ResultT]):
    """Runs one micro-batch at a time."""

    def cost(self, request: RequestT) -> int:
        """Tokens that the request costs when it runs; at least 1."""
        ...

    async def run(self, requests: Sequence[RequestT]) -> Sequence[ResultT | MempoError]:
        """A result, or what was wrong with it, for each request, in order: one bad item fails nobody else.

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
