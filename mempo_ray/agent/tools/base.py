"""What a tool is: an OpenAI function schema, and four async steps in the life of an episode.

create ──▶ instance ──▶ execute … execute ──▶ calc_reward ──▶ release
             first call of an episode           its end         always
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mempo_ray.contracts import EpisodeRequest, Passage
from mempo_ray.ports import RunCode, Search

LONGEST_LINE = 1000  # characters; a longer line of a text result is several passages
LONGEST_TEXT = 32_768  # characters of a text result that are looked at


@dataclass(frozen=True)
class Services:
    """What tools may use of the rest of the system. `run_code` is None where no tool needs a sandbox."""

    search: Search
    run_code: RunCode | None = None
    runs_at_once: int | None = None
    """Programs that the sandbox runs at once; None: any number."""


@dataclass(frozen=True)
class ToolResult:
    """What the policy gets to read: shown one passage a line, and cut between two of them at the token limit."""

    passages: Sequence[Passage]

    @classmethod
    def of_text(cls, text: str) -> ToolResult:
        """A text, a passage a line. An empty one is shown as such, since silence would look like a failure."""
        lines = [
            line[start : start + LONGEST_LINE]
            for line in text[:LONGEST_TEXT].strip("\n").splitlines() or ["(no output)"]
            for start in range(0, max(len(line), 1), LONGEST_LINE)
        ]
        if len(text) > LONGEST_TEXT:
            lines.append(f"[cut at {LONGEST_TEXT} characters]")
        return cls([Passage("", "", line) for line in lines])

    @classmethod
    def error(cls, reason: str) -> ToolResult:
        """The policy's own mistake, told to it. What is not its doing is raised instead."""
        return cls.of_text(f"error: {reason}")


class BaseTool:
    """One tool of a worker, shared by its episodes; what belongs to one episode is the `instance`.

    A subclass sets `name`, `description`, `parameters` (the JSON schema of its arguments, an object), writes `execute`,
    and registers: `@TOOLS.register("mine")` in a module of `plugins`, then `agent.tools: [search, mine]`.

    Every step may raise InfrastructureError, or anything else: the call is tried again, or the episode ends as
    `tool_failed`, which is counted and leaves the statistics.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any]
    is_idempotent: bool = True
    """False: a call that failed is not made again, since it may have had its effect."""
    calls_at_once: int | None = None
    """Of one worker; None: any number. A call that waits for its turn uses its episode's time, not its own."""

    def __init__(self, services: Services, top_k: int, config: Mapping[str, Any]) -> None:
        """`top_k`: `agent.top_k`. `config`: the tool's own keys of `agent.tools_file`."""

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's function calling has it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def create(self, request: EpisodeRequest) -> Any:
        """The instance of one episode."""
        return None

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """Answer one call. `arguments` have the names and types of `parameters`."""
        raise NotImplementedError

    async def calc_reward(self, instance: Any) -> float | None:
        """What the tool says of the episode: `tool_reward/<name>` in `reward_extra_info`. None: nothing."""
        return None

    async def release(self, instance: Any) -> None:
        """Give back what `create` took."""


def text_parameter(name: str, description: str) -> dict[str, Any]:
    """The JSON schema of arguments that are one text."""
    return {"type": "object", "properties": {name: {"type": "string", "description": description}}, "required": [name]}


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
}  # fmt: skip


def problem_of(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, '' where nothing is: names, and the types of the first level.

    Example:
        >>> problem_of({"querry": "x"}, text_parameter("query", ""))
        "missing argument 'query'; unknown argument 'querry'"
    """
    properties = parameters.get("properties") or {}
    problems = [f"missing argument {name!r}" for name in parameters.get("required", ()) if name not in arguments]
    for name, value in arguments.items():
        kind = properties.get(name, {}).get("type")
        if name not in properties:
            if parameters.get("additionalProperties", False) is False:
                problems.append(f"unknown argument {name!r}")
        elif isinstance(kind, str) and kind in _TYPES:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number if kind in ("integer", "number") else True) or not isinstance(value, _TYPES[kind]):
                problems.append(f"argument {name!r} must be a JSON {kind}")
    return "; ".join(problems)
