"""Folders of random reward models that speak the tiny policy's words."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForTokenClassification

TINY = Path(__file__).parents[2] / "mempo_ray" / "assets" / "tiny_policy"


def save_model(folder: Path, kind: type[PreTrainedModel], num_labels: int) -> Path:
    """A random two-layer model with a head that tells texts apart, beside the tiny policy's tokenizer."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=num_labels,
        pad_token_id=0,
        initializer_range=0.3,
    )
    kind(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


def save_process_model(folder: Path) -> Path:
    return save_model(folder, Qwen2ForTokenClassification, 2)
