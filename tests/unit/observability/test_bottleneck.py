"""Worked cases: a step of 100 s, of which one stage took most."""

from __future__ import annotations

import re

import pytest

from mempo_ray.config.reference import known_as
from mempo_ray.observability.bottleneck import SHORT_S, STAGES, bound_by, find_bottleneck

STEP = {"time/step_s": 100.0, "time/generation_s": 20.0, "time/update_s": 20.0, "time/sync_s": 5.0}
"""20 s of generation, 20 s of update, 5 s of sync; the other 55 s are up to the case."""

RETRIEVAL = {"retrieval/num_replicas": 2.0, "retrieval/encode_share": 0.2}

CASES = {
    "generation": (
        STEP | {"time/generation_s": 70.0, "rollout/turn_wait_s": 900.0, "rollout/tool_wait_s": 100.0},
        ("generation", "rollout engines", "raise rollout.replicas", 0.63),
    ),
    "retrieval that computes": (
        STEP | RETRIEVAL | {"time/generation_s": 70.0, "rollout/turn_wait_s": 100.0, "rollout/tool_wait_s": 900.0,
                            "retrieval/busy_s": 130.0},
        ("tools", "retrieval", "raise retrieval.replicas, or retrieval.cache_entries", 0.63),
    ),
    "retrieval that encodes": (
        STEP | RETRIEVAL | {"time/generation_s": 70.0, "rollout/turn_wait_s": 100.0, "rollout/tool_wait_s": 900.0,
                            "retrieval/busy_s": 130.0, "retrieval/encode_share": 0.9},
        ("tools", "retrieval", "encoding is most of it: retrieval.device=cuda, or raise retrieval.replicas", 0.63),
    ),
    "retrieval that waits": (
        STEP | RETRIEVAL | {"time/generation_s": 70.0, "rollout/turn_wait_s": 100.0, "rollout/tool_wait_s": 900.0,
                            "retrieval/busy_s": 10.0},
        ("tools", "retrieval", "replicas are idle most of the time: lower retrieval.max_wait_s", 0.63),
    ),
    "tools that are not ours": (
        STEP | {"time/generation_s": 70.0, "rollout/turn_wait_s": 0.0, "rollout/tool_wait_s": 900.0},
        ("tools", "tools", "look at the server of retrieval.url, or at the tools of agent.tools", 0.7),
    ),
    "scoring by the ranks": (
        STEP | {"scoring/exposed_s": 49.0, "reward/exposed_s": 1.0},
        ("scoring", "policy ranks", "raise policy.ranks, or set memory_reward.scorer_engine=vllm", 0.49),
    ),
    "scoring by the engines": (
        STEP | {"scoring/exposed_s": 50.0, "reward/exposed_s": 0.0, "scoring/engine_busy_s": 50.0},
        ("scoring", "engines that score", "raise rollout.replicas, or set memory_reward.scorer_engine=policy", 0.5),
    ),
    "reward": (
        STEP | {"scoring/exposed_s": 5.0, "reward/exposed_s": 45.0},
        ("reward", "reward workers", "raise reward.workers or reward.processes", 0.45),
    ),
    "update": (
        STEP | {"time/update_s": 70.0},
        ("update", "policy ranks", "raise policy.ranks, or policy.micro_batch_tokens where memory allows", 0.7),
    ),
    "sync": (STEP | {"time/sync_s": 60.0}, ("sync", "weight transport", "see weight_sync.transport", 0.6)),
    "the driver": (STEP, ("other", "driver", "see time/… in metrics.jsonl", 0.55)),
}  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), CASES.values(), ids=CASES)
def test_the_stage_that_took_most_is_named_with_its_pool_and_what_to_change(values, expected):
    verdict = find_bottleneck(values)
    stage, pool, advice, share = expected
    assert (verdict.stage, verdict.pool, verdict.advice) == (stage, pool, advice)
    assert verdict.shares[stage] == pytest.approx(share)
    assert str(verdict) == f"{stage} took {share:.0%} of the step ({pool}): {advice}"


@pytest.mark.parametrize("values", [values for values, _ in CASES.values()], ids=CASES)
def test_the_shares_are_of_all_stages_and_add_up_to_one(values):
    metrics = find_bottleneck(values).metrics
    assert list(metrics) == [f"bottleneck/{stage}_share" for stage in STAGES]
    assert sum(metrics.values()) == pytest.approx(1)
    assert min(metrics.values()) >= 0


@pytest.mark.parametrize("advice", [advice for _, (_, _, advice, _) in CASES.values()])
def test_every_key_that_is_named_exists(advice):
    keys = re.findall(r"\b[a-z_]+\.[a-z_]+\b", advice.replace("metrics.jsonl", ""))
    assert [key for key in keys if known_as(key) is None] == []


def test_what_is_no_step_has_no_verdict():
    assert find_bottleneck({"eval/em": 0.5, "time/evaluation_s": 3.0}) is None


def test_advice_is_given_on_a_step_of_some_seconds_only():
    step = {"time/step_s": SHORT_S, "time/generation_s": SHORT_S}
    assert bound_by(step) == "bound by: generation took 100% of the step (rollout engines): raise rollout.replicas"
    assert bound_by(step | {"time/step_s": 0.5, "time/generation_s": 0.5}) == ""
    assert bound_by({"eval/em": 0.5}) == ""


def test_stages_that_overlap_do_not_add_up_to_more_than_the_step():
    verdict = find_bottleneck({"time/step_s": 10.0, "time/generation_s": 8.0, "time/update_s": 8.0})
    assert verdict.shares["generation"] == verdict.shares["update"] == 0.5
    assert verdict.shares["other"] == 0
