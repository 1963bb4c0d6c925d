"""A configuration key that nobody reads is a promise that nobody keeps."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from mempo_ray.config.reference import fields, section_of

PACKAGE = Path(__file__).parents[2] / "mempo_ray"

HOMES = {
    "agent": {"episode.py", "prompt.py", "search.py", "agent_loop.py"},
    "agent.limits": {"episode.py", "prompt.py", "search.py"},
    "alarms": {"alarms.py"},
    "algorithm": {
        "advantage.py",
        "estimators.py",
        "policy_loss.py",
        "correction.py",
        "step.py",
        "rank.py",
        "kl_reward.py",
    },
    "algorithm.adaptive_kl": {"kl_reward.py", "experience.py"},
    "algorithm.group_filter": {"advantage.py", "experience.py"},
    "batch_executor": {"batch_executor.py", "scheduler.py", "settings.py"},
    "cold_start": {"cold_start.py", "sft.py", "session.py"},
    "data": {"tasks.py", "session.py", "preflight.py"},
    "eval": {"session.py", "driver.py"},
    "memory_reward": {"memory_reward.py", "experience.py"},
    "placement": {"plan.py", "memory.py", "cluster.py", "fleet.py", "preflight.py"},
    "policy": {"rank.py", "policy.py", "model.py", "sharding.py", "step.py"},
    "retrieval": {"retrieval.py", "search.py", "schema.py"},
    "retrieval.scaling": {"elastic.py"},
    "reward": {
        "reward.py",
        "naive.py",
        "contract.py",
        "custom.py",
        "text.py",
        "mempo.py",
        "search_qa.py",
        "session.py",
    },
    "reward.custom_function": {"custom.py", "naive.py", "batch.py", "preflight.py"},
    "reward.overlong": {"dapo.py"},
    "reward.styles.<name>": {"hybrid.py", "preflight.py"},
    "reward.styles.<name>.judge": {"api.py", "limiter.py"},
    "reward.styles.<name>.reward_model": {"reward_model.py", "plan.py", "hybrid_host.py"},
    "reward.sandbox": {"outcome.py", "local.py", "remote.py"},
    "rollout": {"rollout.py", "vllm_engine.py", "engine.py", "episode.py", "fleet.py"},
    "rollout.scaling": {"elastic.py"},
    "run": {"driver.py", "session.py"},
    "weight_sync": {"weight_sync.py", "fleet.py", "rollout.py", "vllm_engine.py"},
}
"""Where a section goes by another name (`settings`, `self._policy`); elsewhere it is read as `section.key`."""

CHECKED_ONLY = {"rollout.top_p", "rollout.top_k"}
"""Must have their defaults: the schema refuses anything else for training, with the reason."""


def reads() -> dict[str, set[tuple[str, str]]]:
    """Attribute name → (what it is read of, file)."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                found[node.attr].add((owner.lstrip("_"), file.name))
    return found


LEAVES = [key for key, field in fields().items() if section_of(field) is None and "." in key]
READS = reads()
LAST_PARTS = {key.rpartition(".")[2] for key in HOMES}
TIMES = Counter(key.rpartition(".")[2] for key in LEAVES)


@pytest.mark.parametrize("key", sorted(set(LEAVES) - CHECKED_ONLY))
def test_key_is_read(key):
    """By name where only one section has a key of that name; else as `section.key`, or in a file of the section."""
    section, _, name = key.rpartition(".")
    where = {(owner, file) for owner, file in READS[name] if file != "schema.py" or owner in ("a", "self")}
    if TIMES[name] > 1 or name in ("name", "dir", "path", "mode", "seed", "steps"):
        own, home = section.rpartition(".")[2], HOMES[section]
        where = {(owner, file) for owner, file in where if owner == own or (file in home and owner not in LAST_PARTS)}
    assert where, f"{key} is read nowhere: use it or take it out"
