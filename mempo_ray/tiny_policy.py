"""Makes the base checkpoint that the quickstart starts from: `python -m mempo_ray.tiny_policy` (`make tiny-policy`).

    generated worlds ──oracle──▶ OracleTrajectory ──Renderer──▶ rows ──AdamW──▶ assets/tiny_policy

A tiny model learns to copy a fact from a passage only after a phase change, which takes more steps than a quickstart
has. So the base is trained here, once, and shipped. Three choices make the change come early: embeddings are tied
(copying is nearly free), weights start large (std 0.08: attention forms), and a fact has its key directly before its
value (a plain induction head finds it).

The base is a capable but *careless note-taker*. It has learned to search, to copy and to answer from the episodes of
writers who note the first fact they find only with the probability that `NOTED` gives its relation, and who then answer
with what they have. That is the habit which the cold start weakens and RL, with its memory reward, has to break.

Every world here has a seed of `world.BASE_SEEDS`; a run's own worlds cannot have one, so no evaluation world was seen.
Same seed, same machine: the same checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

from mempo_ray.agent.prompt import Renderer, SftRow
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.cold_start import probe_rows, written_turns
from mempo_ray.config.schema import ColdStart, Config
from mempo_ray.contracts import Passage
from mempo_ray.data.oracle import OracleTrajectory, oracle_trajectories
from mempo_ray.data.world import (
    BASE_SEEDS,
    CHAIN,
    JOIN,
    NAMES,
    PEOPLE_NAMES,
    PERSON_RELATIONS,
    PLACE_NAMES,
    PLACE_RELATIONS,
    World,
    make_question,
    make_world,
    task_of,
)

ASSET = Path(__file__).parent / "assets" / "tiny_policy"

END_OF_TURN = "<|end|>"
MARKERS = ("<|pad|>", "<|unk|>", END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>")
TAGS = tuple(f"<{slash}{tag}>" for tag in ("mem", "think", "search", "answer", "tool_response") for slash in ("", "/"))
WORDS = (".", "?", JOIN, CHAIN, "need", "nothing", "done", *PERSON_RELATIONS, *PLACE_RELATIONS, *NAMES)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


NOTED = {
    "mentor": 0.8, "boss": 0.55, "home": 0.3, "friend": 0.22, "rival": 0.16, "office": 0.12,
    "mayor": 0.8, "judge": 0.3, "baker": 0.15,
}  # fmt: skip
"""How often the writers of the base's corpus note the first fact they find, by its relation."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the checkpoint; kept in its `training_log.json`."""

    seed: int = 0
    steps: int = 800
    episodes: int = 16
    """Oracle trajectories per step, four of each world."""
    lr: float = 2e-3
    warmup_steps: int = 50
    cooldown_share: float = 0.25
    """Last share of the steps, over which the rate falls linearly to a twentieth."""
    probe_share: float = 0.3
    """Rows of the two scoring forms (algorithm.md §3): the policy must be able to score what it never samples."""
    hidden: int = 128
    layers: int = 3
    heads: int = 2
    ffn: int = 256
    init_std: float = 0.08


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: every word with its space before it is one token, so is every tag."""
    vocabulary = {token: index for index, token in enumerate((*MARKERS, *TAGS, *(f"▁{word}" for word in WORDS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": "<|pad|>",
        "unk_token": "<|unk|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def make_model(recipe: Recipe, vocab_size: int, end_of_turn_id: int) -> Qwen2ForCausalLM:
    """A Qwen2 model with heads of 64, tied embeddings and random float32 weights."""
    torch.manual_seed(recipe.seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.ffn,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=recipe.init_std,
        bos_token_id=None,
        eos_token_id=end_of_turn_id,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).float()


class GeneratedSearch:
    """`ports.Search` over one world, without an index: the fact asked for, then lines that share a word with it.

    Three in five distractors share the relation, one in five the subject, one in five name the subject as a value:
    roughly what the hashed index of the quickstart returns.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [self._hits(query, top_k) for query in queries]

    def _hits(self, query: str, top_k: int) -> list[Passage]:
        relation, subject = query.split()
        found = [f for f in self._world.facts if (f.relation, f.subject) == (relation, subject)]
        while len(found) < top_k:
            kind = self._rng.choices(("relation", "subject", "value"), (3, 1, 1))[0]
            alike = {
                "relation": [f for f in self._world.facts if f.relation == relation],
                "subject": self._world.about(subject),
                "value": [f for f in self._world.facts if f.value == subject],
            }[kind]
            found.append(self._rng.choice([f for f in alike if f not in found] or self._world.facts))
        return [Passage(self._world.passage_id(fact), "", fact.text) for fact in found]


def generated_trajectories(seed: int, num_episodes: int) -> list[OracleTrajectory]:
    """Correct episodes over fresh worlds, four of each; `seed` is one of `BASE_SEEDS`."""
    assert seed in BASE_SEEDS, seed
    rng = random.Random(seed)
    trajectories: list[OracleTrajectory] = []
    while len(trajectories) < num_episodes:
        world = make_world(f"base{seed}", rng.sample(PEOPLE_NAMES, 12), rng.sample(PLACE_NAMES, 4), rng)
        tasks = [task_of(make_question(world, rng.choice((2, 3)), rng), f"base-{seed}-{n}") for n in range(4)]
        trajectories += asyncio.run(oracle_trajectories(tasks, GeneratedSearch(world, rng)))
    return trajectories


def careless(trajectory: OracleTrajectory, rng: random.Random) -> OracleTrajectory:
    """The same episode by a careless writer: perhaps the first fact is never noted, and the answer lacks it.

    The last value is always known: it stands in the tool response that the answering turn sees.
    """
    (first_relation, *_), *_, (_, _, last_value, _) = trajectory.task.metadata["chain"]
    if rng.random() < NOTED[first_relation]:
        return trajectory
    turns = [
        replace(turn, memory=" ".join(trajectory.facts[1:num_found]) or trajectory.turns[0].memory)
        for num_found, turn in enumerate(trajectory.turns)
    ]
    turns[-1] = replace(turns[-1], answer=last_value)
    return replace(trajectory, turns=tuple(turns))


def train(recipe: Recipe, out: Path) -> None:
    """Train from random weights and write the folder. One thread, some minutes."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_tokenizer(out)
    config = Config(cold_start=ColdStart())
    tokenizer = FileTokenizer.from_folder(out)
    renderer = Renderer.from_folder(out, tokenizer, config.agent)
    model = make_model(recipe, len(MARKERS) + len(TAGS) + len(WORDS), tokenizer.end_of_turn_id)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.01)
    curve, started = [], time.monotonic()
    for step in range(recipe.steps):
        rows = _rows_of_step(recipe, step, renderer, config)
        for group in optimiser.param_groups:
            group["lr"] = recipe.lr * _rate(step, recipe)
        loss = _train_step(model, optimiser, rows)
        if step % 50 == 0 or step == recipe.steps - 1:
            curve.append({"step": step, "loss": round(loss, 4), "seconds": round(time.monotonic() - started)})
            print(json.dumps(curve[-1]), flush=True)
    model.save_pretrained(out)
    log = {"recipe": asdict(recipe), "parameters": sum(p.numel() for p in model.parameters()), "curve": curve}
    (out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


def _rows_of_step(recipe: Recipe, step: int, renderer: Renderer, config: Config) -> list[SftRow]:
    """Careless episodes as rollouts would have them, and a share of careful ones in the two scoring forms."""
    seed = BASE_SEEDS.start + recipe.seed * 100_000 + step
    rng = random.Random(seed)
    rows: list[SftRow] = []
    for trajectory in generated_trajectories(seed, recipe.episodes):
        initial = renderer.initial_ids(trajectory.task.question)
        rows += renderer.sft_rows(initial, written_turns(careless(trajectory, rng), renderer, config), config.agent)
        if rng.random() < recipe.probe_share * len(trajectory.turns):
            written = written_turns(trajectory, renderer, config)
            rows += probe_rows(initial, written, trajectory.task.gold_text, renderer)
    return rows


def _rate(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate: linear rise, plateau, linear fall to 1/20."""
    left = (recipe.steps - step) / max(1, recipe.steps * recipe.cooldown_share)
    return min(1.0, (step + 1) / recipe.warmup_steps, max(0.05, left))


def _train_step(model: Qwen2ForCausalLM, optimiser: torch.optim.Optimizer, rows: Sequence[SftRow]) -> float:
    """One AdamW step on the mean loss per output token; returns that loss."""
    num_targets = sum(len(row.output_ids) for row in rows)
    total = 0.0
    for ids, is_target in _length_buckets(rows):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[is_target[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][is_target[:, 1:]], reduction="sum") / num_targets
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    return total


def _length_buckets(rows: Sequence[SftRow], num_buckets: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of like length, padded on the right: ids int64 [S, T] and where an output token stands, bool [S, T].

    Padding needs no attention mask: it lies after every real token of its row, and attention is causal.
    """
    by_length = sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.output_ids))
    for bucket in np.array_split(np.arange(len(rows)), num_buckets):
        wholes = [np.concatenate(by_length[index]) for index in bucket]
        ids = torch.zeros(len(bucket), max(map(len, wholes)), dtype=torch.long)
        is_target = torch.zeros_like(ids, dtype=torch.bool)
        for place, (index, whole) in enumerate(zip(bucket, wholes, strict=True)):
            ids[place, : len(whole)] = torch.from_numpy(whole.astype(np.int64))
            is_target[place, len(by_length[index].prompt_ids) : len(whole)] = True
        yield ids, is_target


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the base of the tiny policy on generated worlds.")
    parser.add_argument("--out", type=Path, default=ASSET)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(replace(Recipe(), seed=arguments.seed, steps=arguments.steps), arguments.out)


if __name__ == "__main__":
    main()
