"""A `ports.Search` over a dictionary, which can be told to fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mempo_ray.contracts import Passage
from mempo_ray.errors import ToolFailed


class FakeSearch:
    """`passages[query]`, else `default`. The first `num_failures` calls raise ToolFailed. `queries` keeps all calls."""

    def __init__(
        self,
        passages: Mapping[str, Sequence[Passage]] | None = None,
        *,
        default: Sequence[Passage] = (),
        num_failures: int = 0,
    ) -> None:
        self._passages, self._default, self._num_failures = passages or {}, default, num_failures
        self.queries: list[str] = []

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.queries.extend(queries)
        if self._num_failures > 0:
            self._num_failures -= 1
            raise ToolFailed("the index is away")
        return [list(self._passages.get(query, self._default))[:top_k] for query in queries]
