"""How a turn asks for a tool: forms of a call, by the name in `agent.tool_parser`.

    tags     <search>mentor Boko</search>   <python>print(1)</python>   a tag a tool
    hermes   <tool_call>{"name": "search", "arguments": {"query": "mentor Boko"}}</tool_call>

To the format rules (protocol.py) either is "the search": a turn takes one call or one answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mempo_ray.agent.protocol import Block
from mempo_ray.agent.tools.base import BaseTool
from mempo_ray.registry import Registry


@dataclass(frozen=True)
class ToolCall:
    """Which tool, and with what."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        values = list(self.arguments.values())
        return f"{self.name} {values[0] if len(values) == 1 else dict(self.arguments)!r:.200}"


class ToolParser(Protocol):
    """A form of calls."""

    shows_schemas: bool
    """Whether the first prompt lists the tools, by the chat template's own means."""

    def tags(self, names: Sequence[str]) -> tuple[str, ...]:
        """The tags that hold calls, given the names of the tools."""
        ...

    def call(self, block: Block, tools: Mapping[str, BaseTool]) -> ToolCall | None:
        """The call that a block of such a tag asks for; None: none that can be understood, and no action."""
        ...


class TagParser:
    """`<name>…</name>`: the text is the argument of a tool that takes one text, and JSON for any other."""

    shows_schemas = False

    def tags(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names)

    def call(self, block: Block, tools: Mapping[str, BaseTool]) -> ToolCall | None:
        properties = tools[block.name].parameters.get("properties") or {}
        if [kind.get("type") for kind in properties.values()] == ["string"]:
            return ToolCall(block.name, {next(iter(properties)): block.text})
        arguments = _object(block.text)
        return None if arguments is None else ToolCall(block.name, arguments)


class HermesParser:
    """`<tool_call>` with JSON, as Hermes 2 and Qwen 2.5 and 3 were trained to write it."""

    shows_schemas = True

    def tags(self, names: Sequence[str]) -> tuple[str, ...]:
        return ("tool_call",)

    def call(self, block: Block, tools: Mapping[str, BaseTool]) -> ToolCall | None:
        match _object(block.text):
            case {"name": str() as name, "arguments": dict() as arguments} if name in tools:
                return ToolCall(name, arguments)
        return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # JSON may escape half of a UTF-16 pair, which is no text
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


TOOL_PARSERS: Registry[type[ToolParser]] = Registry("agent.tool_parser")
TOOL_PARSERS.register("tags")(TagParser)
TOOL_PARSERS.register("hermes")(HermesParser)
