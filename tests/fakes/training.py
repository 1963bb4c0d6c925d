"""Small inputs for the policy's tests: a random model of two layers, random trajectories, commands over them."""

from __future__ import annotations

import json
import multiprocessing
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mempo_ray.config.schema import Config
from mempo_ray.contracts import (
    EndReason,
    LogProbRequest,
    PayloadRef,
    Segment,
    Slice,
    Task,
    TrainCommand,
    TrainItem,
    Trajectory,
    TrajectoryBatch,
    Turn,
)
from mempo_ray.training.settings import RankSettings

VOCAB = 434


def write_tiny_model(folder: Path, *, family: str = "qwen2", tied: bool = True, hidden: int = 32) -> Path:
    """A random model of two layers (qwen2 | llama), in a folder as Hugging Face writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=2 * hidden,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"stands": "for a tokenizer"}))
    return folder


def settings(folder: Path, **sections: dict) -> RankSettings:
    """RankSettings of a configuration with these sections; a high learning rate, so that steps are seen."""
    policy = {"model": str(folder), "lr": 1e-2, "max_grad_norm": 1e6, **sections.pop("policy", {})}
    return RankSettings.from_config(Config.model_validate({"policy": policy, **sections}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def trajectory(seed: int, num_turns: int = 2, *, mask_last: bool = False) -> TrajectoryBatch:
    """Random turns; each output opens with a <mem> span of 3 tokens. `mask_last`: the system added the last token."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> np.ndarray:
        return rng.integers(0, VOCAB, rng.integers(low, high)).astype(np.int32)

    turns = []
    for turn in range(num_turns):
        output = tokens(5, 12)
        mask = np.ones(len(output), np.uint8)
        mask[-1] = not mask_last
        turns.append(
            Turn(
                prompt_ids=tokens(6, 14),
                output_ids=output,
                output_logprobs=np.where(mask, rng.normal(-6, 0.2, len(output)), 0).astype(np.float32),
                output_mask=mask,
                tool_ids=tokens(3, 6) if turn < num_turns - 1 else np.empty(0, np.int32),
                memory_ids=output[:3],
                spans={"mem": (0, 3), "think": (-1, -1), "search": (-1, -1), "answer": (-1, -1)},
                weight_version=0,
                seed=turn,
                finish_reason="stop",
                text="",
            )
        )
    task = Task(f"t{seed // 10}", "q", (("a",),), "test")
    return TrajectoryBatch.from_trajectories([Trajectory(task, seed % 10, 0, tuple(turns), EndReason.ANSWERED, {}, ())])


def item(payload: TrajectoryBatch, outcome: float, memory: Sequence[float] | None = None) -> TrainItem:
    summary = payload.trajectories()[0].summary()
    ref = PayloadRef(f"{summary.task_id}/{summary.sibling}", handle=None, num_bytes=payload.num_bytes)
    return TrainItem(
        ref, summary, (outcome,) * len(payload), tuple(memory if memory is not None else [0.5] * len(payload))
    )


def train_command(
    payloads: Sequence[TrajectoryBatch],
    outcomes: Sequence[float],
    *,
    mini_batch: Sequence[int] | None = None,
    rank: int = 0,
    world: int = 1,
) -> tuple[TrainCommand, list[TrajectoryBatch]]:
    """This rank's share (items rank, rank + world, …) of one plan, and its payload arguments."""
    mini_batch = mini_batch or [0] * len(payloads)
    num = max(mini_batch) + 1
    own = range(rank, len(payloads), world)
    command = TrainCommand(
        step=0,
        items=tuple(item(payloads[i], outcomes[i]) for i in own),
        mini_batch=tuple(mini_batch[i] for i in own),
        num_mini_batches=num,
        num_trajectories=tuple(list(mini_batch).count(m) for m in range(num)),
    )
    return command, [payloads[i] for i in own]


def forest(name: str, payload: TrajectoryBatch) -> LogProbRequest:
    """Prompt of turn 1 with two continuations: its output (a slice, all marked) and three given ids (two marked)."""
    prompt, output = (payload.ragged[column][0] for column in ("prompt_ids", "output_ids"))
    segments = (
        Segment(-1, Slice("prompt_ids", 0), len(prompt)),
        Segment(0, Slice("output_ids", 0), len(output), (0, len(output))),
        Segment(0, (1, 2, 3), 3, (1, 3)),
    )
    return LogProbRequest(name, segments)


def run_ranks(world: int, scenario: Callable[..., None], *arguments: object, timeout_s: float = 120) -> None:
    """`scenario(rank, world, port, *arguments)` in `world` new processes; fails if one fails or misses the deadline."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    ranks = [context.Process(target=scenario, args=(rank, world, port, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout_s)
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * world
