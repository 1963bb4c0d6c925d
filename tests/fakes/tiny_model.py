"""A random Qwen2-like model folder of 0.5 M parameters, and what transformers says about it: the referee of engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mempo_ray.contracts import WeightManifest, WeightProof

VOCAB_SIZE = 434
END_OF_TURN_ID = 1
PROOF_IDS = tuple(int(i) for i in np.random.default_rng(7).integers(2, VOCAB_SIZE, 32))


def save_tiny_model(folder: Path, seed: int) -> Qwen2ForCausalLM:
    """Tied embeddings and a wide initial scale, so that other weights give clearly other log-probs."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.08,
        eos_token_id=END_OF_TURN_ID,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def save_tiny_tokenizer(folder: Path) -> tuple[int, int]:
    """A word-level tokenizer over the model's vocabulary; returns the ids of </search> and </answer>."""
    words = ["?", "<eot>", "</search>", "</answer>", *(f"w{i}" for i in range(4, VOCAB_SIZE))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="<eot>").save_pretrained(folder)
    return 2, 3


@torch.no_grad()
def logprobs(model: Qwen2ForCausalLM, ids: list[int] | tuple[int, ...], temperature: float = 1.0) -> np.ndarray:
    """float32 [T-1]: log-probs of ids[1:], of logits / temperature."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def manifest(model: Qwen2ForCausalLM, folder: Path, version: int) -> WeightManifest:
    """What a policy with this model would publish."""
    return WeightManifest(version, str(folder), WeightProof(PROOF_IDS, tuple(logprobs(model, PROOF_IDS).tolist())))
