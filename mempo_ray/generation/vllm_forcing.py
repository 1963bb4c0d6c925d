"""Forced decoding inside vLLM's engine core: the engine "samples" given tokens and reports their log-probs.

vLLM answers `prompt_logprobs` without its prefix cache; decoded tokens do use it. So a scored continuation is decoded:
its prefix is the prompt, and this processor leaves the sampler one token at each step. The log-probs stay the model's
own because `logprobs_mode="raw_logprobs"` takes them before any processor runs.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

FORCED = "mempo_forced_ids"
"""Key of `SamplingParams.extra_args`: the ids to decode."""


class ForcedTokens(LogitsProcessor):
    """Rows of requests that carry `FORCED` allow one token, the next of theirs; all other rows are left alone."""

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._forced: dict[int, tuple[list[int], list[int]]] = {}  # row → ids to decode, ids decoded so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._forced, batch_update, _forced_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits float32 [rows, vocab], in place."""
        if self._forced:
            rows = torch.tensor(list(self._forced), device=self._device)
            tokens = torch.tensor([ids[len(done)] for ids, done in self._forced.values()], device=self._device)
            logits[rows] = -torch.inf
            logits[rows, tokens] = 0.0
        return logits


def _forced_of(
    params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
) -> tuple[list[int], list[int]] | None:
    """vLLM appends to `output_ids` as it decodes."""
    forced = (params.extra_args or {}).get(FORCED)
    return None if forced is None else (forced, output_ids)
