"""Whether all nodes that read or write a run's folder see the same one.

driver ──writes a token──▶ folder ◀──reads it, writes its own── a task in the bundle of each such actor
driver ──reads them all──▶ nothing, or ConfigError naming the node and the remedy
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import ray

from mempo_ray.actors.calls import answer
from mempo_ray.config.schema import Config
from mempo_ray.errors import ConfigError
from mempo_ray.placement.plan import folder_roles
from mempo_ray.placement.reserve import Reservation

ANSWER_S = 60.0
"""For a node to start a worker process and answer."""


async def check_shared(config: Config, folder: Path, reservation: Reservation) -> None:
    """Exchange tokens with the node of each actor that uses the run's folder.

    Raises:
        ConfigError: a node does not see what the driver wrote, or the driver not what it wrote.
        InfrastructureError: a node did not answer.
    """
    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return
    tokens = folder / ".tokens"
    tokens.mkdir(exist_ok=True)
    mine = _write(tokens)
    placed = {role.name: role.count for role in reservation.plan.roles if role.name in folder_roles(config)}
    exchanges = {
        f"token of {role}-{i}": _exchange.options(**_beside(reservation, role, i)).remote(str(tokens), mine)
        for role, count in placed.items()
        for i in range(count)
    }
    for node, theirs in await asyncio.gather(*(answer(ref, what, ANSWER_S) for what, ref in exchanges.items())):
        if theirs is None or not (tokens / theirs).exists():
            what = f"run.dir: {config.run.dir}"
            if "://" in config.run.dir:
                what = f"run.dir: the local part of {config.run.dir}, {folder.parent} (MEMPO_LOCAL_RUNS),"
            raise ConfigError(
                f"{what} is not shared: node {node} does not see what the driver's node writes in {folder}. Put it on "
                "a file system that all nodes mount at this path (NFS, EFS, FSx, Filestore), or run on one node."
            )
    for token in tokens.iterdir():
        token.unlink()
    tokens.rmdir()


@ray.remote(num_cpus=0, max_retries=0)
def _exchange(tokens: str, theirs: str) -> tuple[str, str | None]:
    """(this node's address, the token that it wrote; None where the driver's is not to be seen)."""
    folder = Path(tokens)
    seen = (folder / theirs).exists()
    return ray.util.get_node_ip_address(), _write(folder) if seen else None


def _write(folder: Path) -> str:
    token = uuid.uuid4().hex
    (folder / token).touch()
    return token


def _beside(reservation: Reservation, role: str, index: int) -> dict[str, object]:
    """Options of a task on the node of an actor that is not there yet; it takes nothing of the actor's bundle."""
    return {**reservation.options(role, index), "num_cpus": 0, "num_gpus": 0}
