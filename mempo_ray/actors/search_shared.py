"""Equal searches of one process are made once: `ports.Search` in front of another one.

Siblings of a task run in one agent worker and ask the same things, so most of a step's searches end here, before they
cost a call to another process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from mempo_ray.contracts import Passage
from mempo_ray.ports import Search

MAX_KEPT = 8_192
"""Searches kept, least recently used out first: some steps' worth, about 20 MB."""

Key = tuple[str, int]
"""Query and k."""


class SharedSearch:
    """Single-flight and a small cache. Failures are not kept: those who waited fail, the next one asks again."""

    def __init__(self, search: Search, max_kept: int = MAX_KEPT) -> None:
        self._search, self._max_kept = search, max_kept
        self._asked: OrderedDict[Key, asyncio.Task[dict[Key, list[Passage]]]] = OrderedDict()  # in flight or done
        self.num_queries = 0
        self.num_repeated = 0
        """Of them, those that were answered without asking."""

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Raises as the other one. A caller that is cancelled takes nothing from those who share its search."""
        keys = [(query, top_k) for query in queries]
        new = [key for key in dict.fromkeys(keys) if key not in self._asked]
        self.num_queries += len(keys)
        self.num_repeated += len(keys) - len(new)
        if new:
            task = asyncio.create_task(self._ask(new, top_k))
            task.add_done_callback(_see)
            self._asked |= dict.fromkeys(new, task)
        shared = {key: self._asked[key] for key in keys}
        for key in keys:
            self._asked.move_to_end(key)
        while len(self._asked) > self._max_kept:
            self._asked.popitem(last=False)
        return [list((await asyncio.shield(shared[key]))[key]) for key in keys]

    async def _ask(self, keys: Sequence[Key], top_k: int) -> dict[Key, list[Passage]]:
        try:
            return dict(zip(keys, await self._search([query for query, _ in keys], top_k), strict=True))
        except BaseException:
            for key in keys:
                self._asked.pop(key, None)
            raise


def _see(task: asyncio.Task) -> None:
    """Every caller may have left, and nobody else would look at its error."""
    if not task.cancelled():
        task.exception()
