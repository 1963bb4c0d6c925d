"""The gang of ranks: process group, device mesh, FSDP2 sharding, and the few collectives that the rank needs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from mempo_ray.config.schema import Policy


@dataclass(frozen=True)
class Gang:
    """This rank's place among all ranks. Also the owner of the process group: `leave` ends it."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def join(cls, rank: int, world: int, master: tuple[str, int], device: str, timeout_s: float) -> Gang:
        """Meet the other ranks at `master` (ip, port). gloo on CPU, NCCL on GPUs; one rank is a gang as well.

        Raises:
            torch.distributed.DistError: not all ranks came within `timeout_s`.
        """
        if device == "cuda":
            torch.cuda.set_device(0)  # a rank sees exactly the GPU that its placement gave it
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method=f"tcp://{master[0]}:{master[1]}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(rank, world, torch.device(device), init_device_mesh(device, (world,)))

    def leave(self) -> None:
        dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, in place."""
        dist.all_reduce(values)
        return values

    def max(self, value: float) -> float:
        """Largest value over ranks."""
        tensor = torch.tensor(float(value), dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def barrier(self) -> None:
        self.max(0)


def offloads(policy: Policy, gang: Gang) -> bool:
    """Whether shards, gradients and optimiser state live in host memory; on CPU there is nothing to offload from."""
    return policy.cpu_offload and gang.device.type == "cuda"


def shard(model: nn.Module, layers: nn.ModuleList, policy: Policy, gang: Gang) -> None:
    """FSDP2 over the gang, in place: each layer is a unit, the rest (embeddings, norm, head) another.

    Parameters stay in their own dtype (float32 master weights); forward and backward run in `policy.dtype`,
    gradients are reduced in float32. The root is resharded after each forward too: left gathered (the default), it
    would survive a load of other weights and go on answering with the old ones.
    """
    precision = MixedPrecisionPolicy()
    if policy.dtype == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if offloads(policy, gang) else OffloadPolicy()
    for module in (*layers, model):
        fully_shard(module, mesh=gang.mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=True)
