"""Two small model folders made on the spot: byte-level BPE like Qwen2.5, WordLevel like the tiny policy."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = tuple(
    f"<{slash}{name}>" for name in ("mem", "think", "search", "answer", "tool_response") for slash in ("", "/")
)
WORDS = (
    *("<unk>", "▁nothing", "▁need", "▁done", "▁mentor", "▁home", "▁and", "▁?", "▁.", "▁user", "▁assistant"),
    *("▁Boko", "▁Sari", "▁Vela", "▁Lund", "▁Kim"),
)
_TURNS = (
    "<mem>a fact: Sari was born in Zürich.</mem><think>I need the mentor of Boko</think><search>mentor Boko</search>\n",
    "<mem>nothing known yet</mem>\n<think>now I know</think>\n<answer>Sari Lund</answer> assistant user\n",
)


def byte_level_folder(folder: Path) -> Path:
    """Tags are ordinary text here, so tokens such as `><` and `>\\n` straddle their borders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TURNS * 4, trainer)
    return _write(folder, tokenizer)


def metaspace_folder(folder: Path) -> Path:
    """Words and names of one small world; tags are added tokens; a new line is a space."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace("\n", " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return _write(folder, tokenizer)


def _write(folder: Path, tokenizer: Tokenizer) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
