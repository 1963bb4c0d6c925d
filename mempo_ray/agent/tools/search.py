"""`search`: passages of the corpus for a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mempo_ray.agent.tools.base import BaseTool, Services, ToolResult, text_parameter


class SearchTool(BaseTool):
    """At most `agent.top_k` passages of a `ports.Search`, best first."""

    name = "search"
    description = "Search the corpus; returns the best matching passages."
    parameters = text_parameter("query", "What to look for.")

    def __init__(self, services: Services, top_k: int, config: Mapping[str, Any]) -> None:
        self._search, self._top_k = services.search, top_k

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        (passages,) = await self._search([arguments["query"]], self._top_k)
        return ToolResult(passages[: self._top_k])
