"""A `batching.runner.Gang` of one real rank in this process: the policy without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mempo_ray.batching.packing import RankShare, score_shares
from mempo_ray.batching.runner import Ran
from mempo_ray.contracts import CommandReply, LogProbRequest, LogProbResult
from mempo_ray.errors import DataError

if TYPE_CHECKING:
    from mempo_ray.training.rank import PolicyRank


class SoloGang:
    """Obeys in the caller's thread. Payload handles are the payloads themselves."""

    num_ranks = 1
    pads = False

    def __init__(self, rank: PolicyRank) -> None:
        self._rank = rank
        self.version = rank.version

    def cost(self, request: LogProbRequest) -> int:
        return request.num_forest_tokens

    async def run(self, requests: Sequence[LogProbRequest]) -> Ran[LogProbResult]:
        (reply,) = await self.execute(score_shares(requests, [range(len(requests))]))
        results = [DataError(value) if isinstance(value, str) else value for value in reply.value]
        return Ran(results, reply.num_tokens, 0)

    async def execute(self, shares: Sequence[RankShare]) -> list[CommandReply]:
        (share,) = shares
        reply = self._rank.run(self._rank.next_sequence, share.command, *share.payloads)
        self.version = reply.version
        return [reply]
