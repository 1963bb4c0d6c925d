"""Tools that an action can call, by the name of their tag. `agent.tools` lists those a run may use."""

from mempo_ray.agent.tools.search import SearchTool
from mempo_ray.registry import Registry

TOOLS: Registry[type[SearchTool]] = Registry("agent.tools")
TOOLS.register("search")(SearchTool)

__all__ = ["TOOLS", "SearchTool"]
