"""From a YAML file and `key=value` words to a frozen `Config`, or to one clear line a mistake.

    command line ──▶ file (or the embedded quickstart) ──▶ ${oc.env:VAR,default} ──▶ overrides ──▶ schema

No torch, ray or transformers here: a wrong key is reported within a second.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from mempo_ray.config.job import placed
from mempo_ray.config.reference import expected, fields, known_as
from mempo_ray.config.schema import Config
from mempo_ray.errors import ConfigError

QUICKSTART = Path(__file__).parents[1] / "assets" / "quickstart.yaml"
"""The run of `python -m mempo_ray.driver` without arguments; `configs/quickstart.yaml` is a link to it."""

USAGE = """usage: python -m mempo_ray.driver [--config FILE] [--dry-run] [key=value ...]
Without arguments it runs the quickstart. docs/configuration.md has every key; shipped files are in configs/."""

VERL_SECTIONS = frozenset({"actor_rollout_ref", "critic", "custom_reward_function", "reward_model", "trainer"})
"""No nearest key of ours would be what they mean."""

VERL_KEYS = {
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "data.tasks_per_step",
    "data.prompt_key": "data.question_key",
    "data.max_prompt_length": "rollout.max_model_len",
    "data.max_response_length": "agent.limits.turn_tokens",
    "actor_rollout_ref.model.path": "policy.model",
    "actor_rollout_ref.actor.optim.lr": "policy.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.mini_batches",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "policy.micro_batch_tokens",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_bonus",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "agent.max_turns",
    "algorithm.use_kl_in_reward": "algorithm.kl_in_reward",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef",
    "algorithm.lam": "algorithm.gae_lambda",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
    "custom_reward_function.path": "reward.custom_function.path",
    "custom_reward_function.name": "reward.custom_function.name",
    "reward_model.reward_manager": "reward.manager",
    "trainer.total_training_steps": "run.steps",
    "trainer.total_epochs": "run.steps",
    "trainer.save_freq": "run.checkpoint_every",
    "trainer.test_freq": "eval.every",
    "trainer.val_before_train": "eval.before_train",
    "trainer.default_local_dir": "run.dir",
    "trainer.experiment_name": "run.name",
    "trainer.resume_mode": "run.resume",
    "trainer.logger": "trackers",
}
"""Keys of verl, whose nearest one by spelling is often not the one by meaning (docs/migrating-from-verl.md)."""


@dataclass(frozen=True)
class CommandLine:
    """`[--config FILE] [--dry-run] [key=value …]`, in any order. `file` is None for the embedded quickstart."""

    file: Path | None
    overrides: tuple[str, ...]
    dry_run: bool


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Raises ConfigError for a word that is neither a known option nor `key=value`."""
    file: Path | None = None
    overrides: list[str] = []
    dry_run = False
    words = iter(argv)
    for word in words:
        option, _, value = word.partition("=")
        if option == "--config":
            value = value or next(words, "")
            if not value:
                raise ConfigError("--config needs a file: --config configs/quickstart.yaml")
            file = Path(value)
        elif word == "--dry-run":
            dry_run = True
        elif not word.startswith("-") and "=" in word:
            overrides.append(word)
        else:
            raise ConfigError(f"{word!r} is neither an option nor key=value.\n{USAGE}")
    return CommandLine(file, tuple(overrides), dry_run)


def load_config(argv: Sequence[str] = ()) -> Config:
    """The configuration that a command line asks for. Raises ConfigError, one line a mistake."""
    line = parse_command_line(argv)
    return load_file(line.file, line.overrides)


def load_file(file: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """A file (None = the embedded quickstart), then dotted overrides such as `rollout.replicas=2`."""
    path = QUICKSTART if file is None else Path(file)
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file. The shipped ones are in configs/.") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    try:
        merged = OmegaConf.merge(tree, *(_override(word) for word in overrides))
        raw = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or "configuration"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}. Set the variable or write the value out.") from None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"--config {path}: expected sections (run:, data:, …), got {type(raw).__name__}")
    config = build(raw)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": placed(config.run.dir)})})


def build(raw: Mapping) -> Config:
    """A plain nested mapping to a `Config`. Raises ConfigError."""
    unknown = [_unknown_key(key) for key in _dotted(raw) if known_as(key) is None]
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_mistake(item) for item in error.errors()))) from None


def resolved_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as YAML that `load_file` reads back to an equal `Config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def fail(error: Exception) -> int:
    """Print a failure for a person (stderr, no traceback); returns the process's exit code."""
    print(f"mempo_ray: {error}", file=sys.stderr)
    return getattr(error, "exit_code", 1)


def _override(word: str):
    key, _, value = word.partition("=")
    try:
        return OmegaConf.from_dotlist([word if value else f"{key}=''"])
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{key}: the value in {word!r} is not YAML: {str(error).splitlines()[0]}") from None


def _dotted(raw: Mapping, prefix: str = "") -> Iterator[str]:
    """Dotted keys of the leaves."""
    for name, value in raw.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{key}.")
        else:
            yield key


def _unknown_key(key: str) -> str:
    """Name the nearest known key: within the section, then as a whole, then by the last part in any section."""
    verl = key.lstrip("+")
    if verl in VERL_KEYS:
        return f"{key}: a key of verl, here {VERL_KEYS[verl]}. More are in docs/migrating-from-verl.md."
    if verl.partition(".")[0] in VERL_SECTIONS:
        return f"{key}: a key of verl. Its name here is in docs/migrating-from-verl.md, or docs/configuration.md."
    section, _, name = key.rpartition(".")
    by_name = {known.rpartition(".")[2]: known for known in fields() if "<name>" not in known}
    siblings = {known.rpartition(".")[2]: known for known in fields() if known.rpartition(".")[0] == section}
    wholes = {known: known for known in fields()}
    searches = ((name, siblings, 0.6), (key, wholes, 0.8), (name, by_name, 0.8), (key, wholes, 0.0))
    for given, candidates, cutoff in searches:
        if near := difflib.get_close_matches(given, candidates, n=1, cutoff=cutoff):
            return f"{key}: unknown configuration key. Did you mean {candidates[near[0]]}? See docs/configuration.md."
    raise AssertionError("a cutoff of 0 always matches")


def _mistake(item: Mapping) -> str:
    key = ".".join(str(part) for part in item["loc"])
    while key and known_as(key) is None:  # the place inside a list
        key = key.rpartition(".")[0]
    message = item["msg"].removeprefix("Value error, ")
    if not key:  # a rule over several keys names them itself
        return message
    meaning = fields()[known_as(key) or key].description
    return f"{key}: got {item['input']!r}, expected {expected(key)}." + (f" Meaning: {meaning}" if meaning else "")
