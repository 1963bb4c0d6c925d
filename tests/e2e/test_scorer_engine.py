"""Memories scored by the rollout engines: a whole run with real vLLM, whose ranks only train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.driver_run import SMALL, drive, read_rows, step_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    words = (
        *SMALL,
        "run.name=scorer",
        "run.steps=1",
        "memory_reward.scorer_engine=vllm",
        "rollout.max_model_len=768",  # a full history is longer than any prompt
        "eval.before_train=false",
    )
    return drive(tmp_path_factory.mktemp("runs"), *words).folder


def test_every_memory_has_its_reward_and_the_ranks_scored_nothing(folder):
    metrics = step_metrics(folder, 1)
    assert metrics["executor/score_s"] == 0
    assert metrics["scoring/engine_busy_s"] > 0
    assert metrics["scoring/num_engine_failures"] == 0
    scored = [row["memory_reward"] for row in read_rows(folder, 1).to_pylist() if row["memory_ids"]]
    assert scored
    assert all(reward is not None and -1 < reward < 1 for reward in scored)


def test_the_summary_says_how_much_of_the_scoring_was_hidden(folder):
    summary = json.loads((folder / "summary.json").read_text())
    metrics = step_metrics(folder, 1)
    assert summary["scoring_busy_s"] == pytest.approx(metrics["scoring/engine_busy_s"])
    assert summary["scoring_exposed_s"] == pytest.approx(metrics["scoring/exposed_s"])
    assert 0 <= summary["scoring_hidden_share"] <= 1
