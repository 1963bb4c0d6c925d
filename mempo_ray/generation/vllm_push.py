"""The trainer's side of a push over NCCL or CUDA IPC, by vLLM's own weight-transfer engines. Imports vllm.

    every rank: gather a tensor, cast it ─┐
    rank 0: ── client: init, start ───────┴── tensors (NCCL broadcast | IPC handles) ── client: finish ──▶ engines

The group is formed at the first push and anew when an engine was replaced, so only between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    materialize_full_tensor,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo


class CastSource(WeightSource):
    """A sharded model's tensors, whole, as `dtype` on `device`, in Hugging Face names; for one push.

    Iterating is a collective, so a rank that gives up must `finish`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._left = iter(list(model.named_parameters()))

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._dtype, tuple(p.shape)) for name, p in self._model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._left:
            yield name, materialize_full_tensor(parameter.detach()).to(self._device, self._dtype)

    def finish(self) -> None:
        """Take part in what is left, for the other ranks' sake."""
        for _ in self:
            pass


def init_info(transport: str, rank: int, master: tuple[str, int], num_engine_gpus: int) -> TrainerInitInfo:
    """What a rank brings to the first meeting. `master`: (ip, free port) of rank 0, the only one in NCCL's group."""
    if transport == "ipc":
        return IPCTrainerInitInfo(packed=True, rank=rank)
    return NCCLTrainerInitInfo(master[0], master[1], world_size=1 + num_engine_gpus, rank=rank)


class WeightSender:
    """One rank's end of the transfer, kept from push to push."""

    def __init__(self) -> None:
        self._engine: TrainerWeightTransferEngine | None = None
        self._members: tuple[str, ...] = ()

    def send(
        self, source: WeightSource, info: TrainerInitInfo, client: VLLMWeightSyncClient, members: Sequence[str]
    ) -> None:
        """Push all tensors; blocks until the engines have them. Collective over the ranks.

        Args:
            info: read when the group is formed: at the first push, or when `members` are not those of the last one.
        """
        if self._engine is None or self._members != tuple(members):
            if self._engine is not None:
                self._engine.shutdown()
            self._engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
            self._members = tuple(members)
        self._engine.client, self._engine.source = client, source
        self._engine.send_weights()
