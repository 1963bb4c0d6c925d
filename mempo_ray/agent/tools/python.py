"""`python`: a program in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mempo_ray.agent.tools.base import BaseTool, Services, ToolResult, text_parameter
from mempo_ray.errors import ConfigError


class PythonTool(BaseTool):
    """What the program prints. Every call is a new program: nothing is kept between two of them.

    Raises:
        ConfigError: there is no sandbox.
    """

    name = "python"
    description = "Run a Python program (standard library only); returns what it prints."
    parameters = text_parameter("code", "The program. Print what you want to see.")

    def __init__(self, services: Services, top_k: int, config: Mapping[str, Any]) -> None:
        if services.run_code is None:
            raise ConfigError("agent.tools: 'python' has no sandbox here; see reward.sandbox")
        self._run_code = services.run_code
        self.calls_at_once = services.runs_at_once

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult.of_text(await self._run_code(arguments["code"]))
