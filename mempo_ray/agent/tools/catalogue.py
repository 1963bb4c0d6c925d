"""`agent.tools_file`: more tools of a run, their settings, and MCP servers.

tools:
  - name: calculator                    # registered, like those of agent.tools
  - name: python
    timeout_s: 20                       # of a call; else agent.limits.search_s
    retries: 1                          # else agent.limits.search_retries
  - class: my_package.tools:MyTool      # a BaseTool, by import path; `config` goes to its constructor
    config: {table: prices.csv}
mcp_servers:
  - name: files
    command: [python, server.py]        # over stdin and stdout; `env` adds variables
  - name: web
    url: http://host:8000/mcp           # streamable HTTP
    tools: [fetch]                      # else all that the server lists
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from mempo_ray.config.schema import Positive, Section
from mempo_ray.errors import ConfigError

Retries = Annotated[int, Field(ge=0)]


class ToolEntry(Section):
    """One native tool: `name` of a registered one, or `class`."""

    name: str = ""
    path: str = Field("", alias="class")
    timeout_s: Positive | None = None
    retries: Retries | None = None
    config: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_of(self) -> ToolEntry:
        if bool(self.name) == bool(self.path):
            raise ValueError("give either name or class")
        return self


class McpServerEntry(Section):
    """One MCP server, over stdio (`command`) or HTTP (`url`)."""

    name: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    url: str = ""
    tools: tuple[str, ...] = ()
    timeout_s: Positive | None = None
    retries: Retries | None = None
    startup_s: Positive = 30

    @model_validator(mode="after")
    def _one_of(self) -> McpServerEntry:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        return self


class Catalogue(Section):
    """The whole file."""

    tools: tuple[ToolEntry, ...] = ()
    mcp_servers: tuple[McpServerEntry, ...] = ()


def read_catalogue(path: str) -> Catalogue:
    """The file, checked; nothing is imported or started.

    Raises:
        ConfigError: no such file, not YAML, or a wrong entry; names file, entry and key.
    """
    if not path:
        return Catalogue()
    try:
        return Catalogue.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"agent.tools_file: {path} cannot be read as YAML: {error}") from error
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"agent.tools_file: {path}: {found}") from error
