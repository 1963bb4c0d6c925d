"""The Ray border of one FSDP rank: rendezvous, start, commands. The rank itself is `training.rank.PolicyRank`.

    fleet: rendezvous() of rank 0 ─▶ start(rank, world, master) on all, at once ─▶ run(sequence, command, *payloads)

On failure: an error inside a command leaves the ranks out of step, so the gang is ended and started again from the
newest checkpoint; a rank that waits for a dead one gives up after the collective's deadline.
torch is imported in `start`, so the driver may import this module without it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import psutil
import ray
from ray.actor import ActorHandle

from mempo_ray.actors.metrics_sink import ActorGauges
from mempo_ray.actors.names import own_name
from mempo_ray.actors.weight_sync import EngineClient
from mempo_ray.contracts import Batch, Command, CommandReply, PushCommand
from mempo_ray.errors import WorkerFailed
from mempo_ray.training.settings import RankSettings

if TYPE_CHECKING:
    from mempo_ray.generation.vllm_push import WeightSender
    from mempo_ray.training.rank import PolicyRank


class PolicyWorker:
    """Plain class; `PolicyActor` is its remote form."""

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self._name = "policy"
        self._rank: PolicyRank | None = None
        self._sender: WeightSender | None = None
        self._gauges = ActorGauges("policy")
        self._busy_s = 0.0

    def rendezvous(self) -> tuple[str, int]:
        """This node's ip and a free port on it; rank 0's is the meeting place of all."""
        ip = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((ip, 0))
            return ip, probe.getsockname()[1]

    def start(self, rank: int, world: int, master: tuple[str, int], version: int = 0) -> int:
        """Join the gang and load the model. Returns the policy's number of parameters.

        Args:
            version: the highest weight version of an earlier gang of this run (`PolicyRank`).

        Raises:
            ConfigError: the model folder.
            torch.distributed.DistError: not all ranks came in time.
        """
        import os

        import torch

        from mempo_ray.training.rank import PolicyRank
        from mempo_ray.training.sharding import Gang

        self._name = f"policy rank {rank}/{world}"
        os.environ["GLOO_SOCKET_IFNAME"] = _interface_of(ray.util.get_node_ip_address())
        policy = self.settings.policy
        torch.set_num_threads(policy.threads)
        gang = Gang.join(rank, world, master, policy.device, self.settings.collective_timeout_s)
        self._rank = PolicyRank(self.settings, gang, version=version, push=self._push)
        return sum(p.numel() for p in self._rank.model.parameters())

    def run(self, sequence: int, command: Command, *payloads: Batch) -> CommandReply:
        """Obey one command (`PolicyRank.run`)."""
        if self._rank is None:
            raise WorkerFailed(f"{self._name}: a command before start()")
        began = time.monotonic()
        reply = self._rank.run(sequence, command, *payloads)
        command_s = time.monotonic() - began
        self._busy_s += command_s
        self._gauges.push(
            {
                "rank/version": reply.version,
                "rank/command_s": command_s,
                "rank/busy_s": self._busy_s,
                "rank/memory_gb": self._rank.peak_memory_gb,
            }
        )
        return reply

    def _push(self, rank: PolicyRank, command: PushCommand) -> Mapping[str, str]:
        """Through vLLM's transfer engine, which stays in this process from push to push."""
        from mempo_ray.generation.vllm_push import CastSource, WeightSender, init_info

        self._sender = self._sender or WeightSender()
        engines = cast(Mapping[str, ActorHandle], command.engines)
        is_group = command.transport == "nccl"
        client = EngineClient(engines, command.gpus_per_engine, command.timeout_s, is_group)
        num_engine_gpus = len(engines) * command.gpus_per_engine
        info = init_info(command.transport, rank.gang.rank, self.rendezvous(), num_engine_gpus)
        source = CastSource(rank.model, rank.forward_dtype, rank.gang.device)
        try:
            self._sender.send(source, info, client, list(engines))
        except Exception:
            if not client.failed:
                raise
            source.finish()  # an engine's failure is a value; the other ranks are in these collectives
        return client.failed

    def __repr__(self) -> str:
        return f"PolicyWorker({own_name() or self._name})"


def _interface_of(ip: str) -> str:
    """Name of the network interface that has this address: gloo's own guess by host name fails in containers."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    raise WorkerFailed(f"no network interface of this node has the address {ip}")


PolicyActor = ray.remote(PolicyWorker)
