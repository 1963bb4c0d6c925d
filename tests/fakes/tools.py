"""A tool that counts, fails as often as it is told, and rewards by its count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mempo_ray.agent.tools import BaseTool, Services, ToolResult, text_parameter
from mempo_ray.contracts import EpisodeRequest
from mempo_ray.errors import ToolFailed


class CountingTool(BaseTool):
    """`steps` keeps what happened to the instances of all such tools; a test clears it."""

    name = "count"
    parameters = text_parameter("by", "How far to count on.")
    steps: ClassVar[list[str]] = []

    def __init__(self, services: Services, top_k: int, config: Mapping[str, Any]) -> None:
        self._num_failures = config.get("num_failures", 0)
        self._release_fails = config.get("release_fails", False)
        self.is_idempotent = config.get("is_idempotent", True)

    async def create(self, request: EpisodeRequest) -> dict[str, int]:
        self.steps.append(f"create {request.task.task_id}")
        return {"count": 0}

    async def execute(self, instance: dict[str, int], arguments: Mapping[str, Any]) -> ToolResult:
        if self._num_failures:
            self._num_failures -= 1
            raise ToolFailed("away")
        instance["count"] += int(arguments["by"])
        return ToolResult.of_text(str(instance["count"]))

    async def calc_reward(self, instance: dict[str, int]) -> float:
        return instance["count"] / 10

    async def release(self, instance: dict[str, int]) -> None:
        self.steps.append(f"release {instance['count']}")
        if self._release_fails:
            raise ToolFailed("gone")


class PairTool(BaseTool):
    """Takes two arguments."""

    name = "pair"
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a", "b"],
    }

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult.of_text(f"{arguments['a']} {arguments['b']}")
