"""A reward model from a local folder: a decoder with a classification head, read at the last token of what it judges.

    question, turns ──its own chat template and tokenizer──▶ Conversation ──one padded forward──▶ scores at `ends`

A Bradley-Terry model (Bradley & Terry 1952; one logit, `…ForSequenceClassification`) is read at the last token of the
conversation; a process reward model (the same, or `…ForTokenClassification` with two labels, of which the second is
"good") at the last token of each turn. One process, no shards: reward models are small beside the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mempo_ray.config.schema import RewardModel as Section
from mempo_ray.errors import ConfigError, DataError


@dataclass(frozen=True)
class Conversation:
    """Token ids of a conversation, and the positions whose hidden states the head reads."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]
    truncated: bool = False  # the first tokens are not in it

    def truncate(self, max_tokens: int) -> Conversation:
        """Its last `max_tokens` tokens. What would be read before them is read where the first that is left ends."""
        cut = len(self.ids) - max_tokens
        if cut <= 0:
            return self
        first = next((end - cut for end in self.ends if end >= cut), max_tokens - 1)
        return Conversation(self.ids[cut:], tuple(max(end - cut, first) for end in self.ends), truncated=True)


class RewardModel:
    """Scores conversations; not for several threads at once."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: Section) -> None:
        self._model, self._tokenizer, self._settings = model.eval(), tokenizer, settings
        self._backbone: Any = getattr(model, model.base_model_prefix)
        self._head: Any = getattr(model, "score", None)
        num_labels = model.config.num_labels
        if self._head is None or num_labels not in (1, 2):
            raise ConfigError(
                f"reward_model.folder: {settings.folder} holds a {type(model).__name__} with {num_labels} labels, "
                "which is no reward model here: that is a decoder whose `score` head has one label, or two (bad, good)"
            )

    @classmethod
    def from_folder(cls, settings: Section) -> RewardModel:
        """Sets this process's torch threads. Raises ConfigError: no such folder, or no reward model in it."""
        folder = Path(settings.folder)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"reward_model.folder: {folder} has no config.json; name a local Hugging Face folder")
        torch.set_num_threads(settings.threads)
        names = AutoConfig.from_pretrained(folder).architectures or [""]
        by_token = names[0].endswith("ForTokenClassification")
        auto = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
        model = auto.from_pretrained(folder, dtype=getattr(torch, settings.dtype)).to(settings.device)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"reward_model.folder: {folder} has no tokenizer.json")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # AutoTokenizer puts another in place of some
        if settings.chat_template != "auto":
            tokenizer.chat_template = Path(settings.chat_template).read_text(encoding="utf-8")
        if not tokenizer.chat_template:
            raise ConfigError(f"reward_model.chat_template: {folder} has none of its own; name a jinja file")
        return cls(model, tokenizer, settings)

    def encode(self, question: str, turns: Sequence[str]) -> Conversation:
        """The question as the user's message, the policy's turns as the assistant's.

        Cut on the left at `max_tokens`: a policy that writes too much is judged by its end, and escapes no judgement.

        Raises:
            DataError: the chat template refuses it, or changes a turn.
        """
        solution = "\n".join(turns)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError as error:
            raise DataError(f"reward_model.chat_template refuses the conversation: {error}") from None
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = tuple(encoded["input_ids"])
        ends = turn_ends(text, turns, encoded["offset_mapping"]) if self._settings.process else (len(ids) - 1,)
        return Conversation(ids, ends).truncate(self._settings.max_tokens)

    @torch.inference_mode()
    def score(self, conversations: Sequence[Conversation]) -> list[tuple[float, ...]]:
        """One score for each of a conversation's `ends`: a logit, or its sigmoid (`squash`), or the share of "good"."""
        longest = max(len(c.ids) for c in conversations)
        ids = torch.zeros(len(conversations), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, conversation in enumerate(conversations):  # padding on the right: causal attention needs no more
            ids[row, : len(conversation.ids)] = torch.tensor(conversation.ids)
            mask[row, : len(conversation.ids)] = 1
        device = self._model.device
        hidden = self._backbone(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)[0]
        rows = [row for row, conversation in enumerate(conversations) for _ in conversation.ends]
        ends = [end for conversation in conversations for end in conversation.ends]
        logits = self._head(hidden[rows, ends]).float()
        if logits.shape[-1] == 2:
            scores = logits.softmax(-1)[:, 1]
        else:
            scores = logits[:, 0].sigmoid() if self._settings.squash else logits[:, 0]
        flat = iter(scores.tolist())
        return [tuple(next(flat) for _ in conversation.ends) for conversation in conversations]


def turn_ends(text: str, turns: Sequence[str], offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """For each turn the index of the token that holds its last character.

    An empty turn ends where the turn before does: it is judged as what it adds. Before the first turn with a character
    that is the token in front of that turn; where there is none, the last of all.

    Args:
        offsets: range of characters of `text` that each token holds.

    Raises:
        DataError: a turn is not in the text.

    Example: "<u>q<a>one two", turns ["one", "", "two"], a token a word: the tokens of "one", "one" and "two".
    """
    ends, position = [], max(text.rfind("\n".join(turns).strip()), 0)  # not in the question, which may say the same
    for number, turn in enumerate(turns):
        if bare := turn.strip():
            start = text.find(bare, position)
            if start < 0:
                raise DataError(f"turn {number} is not in the reward model's conversation as the policy wrote it")
            position = start + len(bare)
        ends.append(next((i for i, (_, stop) in enumerate(offsets) if stop >= position), len(offsets) - 1))
    return tuple(ends)
