"""The model that the scoring benchmarks share, and the settings of its FSDP rank on one core."""

from __future__ import annotations

import json
from pathlib import Path

from mempo_ray.config.schema import Config
from mempo_ray.training.settings import RankSettings

VOCAB = 4096


def write_model(folder: Path, seed: int = 0) -> Path:
    """A random 6-layer Llama (256 wide, 4 heads of 64, MLP 896), as Hugging Face writes it: only its cost matters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"stands": "for a tokenizer"}))
    return folder


def rank_settings(folder: Path, **sections: dict) -> RankSettings:
    """Of a run in float32 on one thread without a reference model; `sections` of the configuration may say more."""
    policy = {"model": str(folder), "threads": 1, **sections.pop("policy", {})}
    algorithm = {"kl_coef": 0.0, **sections.pop("algorithm", {})}
    return RankSettings.from_config(Config.model_validate({"policy": policy, "algorithm": algorithm, **sections}))
