"""Tools that a turn can call. `agent.tools` and `agent.tools_file` list those a run may use.

action ──parsers──▶ ToolCall ──toolbox──▶ BaseTool.execute ──▶ ToolResult ──Renderer──▶ tool ids
"""

from mempo_ray.agent.tools.base import BaseTool, Services, ToolResult, text_parameter
from mempo_ray.agent.tools.parsers import TOOL_PARSERS, ToolCall, ToolParser
from mempo_ray.agent.tools.toolbox import TOOLS, Toolbox, ToolSession

__all__ = [
    "TOOLS", "TOOL_PARSERS", "BaseTool", "Services", "ToolCall", "ToolParser", "ToolResult", "ToolSession", "Toolbox",
    "text_parameter",
]  # fmt: skip
