"""Weights pushed over NCCL and CUDA IPC, and memory lent while asleep. Not run on machines without CUDA."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.generation.engine import Engine, build_engine, unproven
from mempo_ray.ports import GenerateRequest
from tests.fakes.tiny_model import END_OF_TURN_ID, VOCAB_SIZE, manifest, save_tiny_model

NUM_GPUS = torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")]

ROLLOUT = Rollout(dtype="float32", max_model_len=512, max_num_seqs=16, gpu_memory_utilization=0.2)
TURN = GenerateRequest(np.random.default_rng(0).integers(2, VOCAB_SIZE, 40).astype(np.int32), 0, 16, group="q")


class Client:
    """The verbs that vLLM's trainer side calls from its thread, carried to the engine's event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def _step(self, step: str, info: dict | None = None) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.transfer(step, info), self._loop).result(timeout=120)

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self._step("init", init_info)

    def start_weight_update(self) -> None:
        self._step("start")

    def update_weights(self, update_info: dict) -> None:
        self._step("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._step("finish")


def push(transport: str, model: torch.nn.Module, client: Client) -> None:
    """The trainer's side; blocks until the engine has everything."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if transport == "ipc":
        info = IPCTrainerInitInfo(rank=0)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        info = NCCLTrainerInitInfo("127.0.0.1", port, world_size=2, rank=0)
    WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model)).send_weights()


@pytest.mark.parametrize(
    "transport",
    [
        "ipc",
        pytest.param(
            "nccl", marks=pytest.mark.skipif(NUM_GPUS < 2, reason="NCCL needs two CUDA devices: trainer and engine")
        ),
    ],
)
async def test_pushed_weights_are_proven_before_they_serve(transport: str, tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    save_tiny_model(old, seed=0)
    model = save_tiny_model(new, seed=1)
    published = replace(manifest(model, new, version=1), uri="")
    sync = WeightSync(transport=transport, max_gap=1e-3)
    engine = build_engine("e", str(old), ROLLOUT, sync, END_OF_TURN_ID, tmp_path / "e.log")
    await engine.start()
    try:
        await asyncio.to_thread(push, transport, model.to(f"cuda:{NUM_GPUS - 1}"), Client(engine))
        assert await engine.update(published) < 1e-3
        assert (await engine.generate(TURN)).weight_version == 1
    finally:
        await engine.close()


async def test_a_sleeping_engine_gives_its_memory_back_and_samples_the_same_afterwards(tmp_path: Path):
    save_tiny_model(tmp_path, seed=0)
    sync = WeightSync(transport="ipc")
    engine = build_engine("e", str(tmp_path), ROLLOUT, sync, END_OF_TURN_ID, tmp_path / "e.log")
    await engine.start()
    try:
        await engine.update(unproven(str(tmp_path)))
        before = await engine.generate(TURN)
        free_awake, _ = torch.cuda.mem_get_info()
        await engine.pause(release_memory=True)
        free_asleep, total = torch.cuda.mem_get_info()
        assert free_asleep - free_awake > 0.1 * total
        await engine.resume()
        after = await engine.generate(TURN)
        assert after.output_ids.tolist() == before.output_ids.tolist()
    finally:
        await engine.close()
