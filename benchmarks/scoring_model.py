"""The model and the worker that the scoring benchmarks share: a random 6-layer Llama, one FSDP rank on one core."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mempo_ray.config.schema import Config
from mempo_ray.training.rank import PolicyRank
from mempo_ray.training.settings import RankSettings

VOCAB = 8192


def write_model(folder: Path, seed: int = 0) -> Path:
    """Hidden 256, 4 heads, 9 M parameters, as Hugging Face writes it. Random: only its log-probs' cost matters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"stands": "for a tokenizer"}))
    return folder


def rank_settings(folder: Path, **sections: dict) -> RankSettings:
    """Of a run in float32 on one thread without a reference model; `sections` of the configuration may say more."""
    policy = {"model": str(folder), "threads": 1, **sections.pop("policy", {})}
    algorithm = {"kl_coef": 0.0, **sections.pop("algorithm", {})}
    return RankSettings.from_config(Config.model_validate({"policy": policy, "algorithm": algorithm, **sections}))


@contextmanager
def open_rank(folder: Path, **sections: dict) -> Iterator[PolicyRank]:
    """The FSDP rank itself in this process, a gang of one; commands go to `rank.run(rank.next_sequence, command, …)`."""
    import torch

    from mempo_ray.training.sharding import Gang

    torch.set_num_threads(1)
    gang = Gang.join(0, 1, ("127.0.0.1", _free_port()), "cpu", 60)
    try:
        yield PolicyRank(rank_settings(folder, **sections), gang)
    finally:
        gang.leave()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
