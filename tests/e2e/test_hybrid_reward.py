"""A whole run whose reward is a sum of a rule, a custom function, a judge and a process reward model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.driver_run import SMALL, drive, read_rows, step_metrics
from tests.fakes.judge_server import JudgeServer
from tests.fakes.reward_model import save_process_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CUSTOM = """
def compute_score(data_source, solution_str, ground_truth, extra_info, unit):
    return {"score": unit, "length": len(solution_str)}
"""


def test_a_run_trains_on_a_hybrid_reward_and_logs_its_parts(tmp_path: Path):
    (tmp_path / "custom.py").write_text(CUSTOM)
    (tmp_path / "judge.jinja").write_text("score 0.25")
    model = save_process_model(tmp_path / "prm")
    with JudgeServer() as server:
        styles = [
            "em.scorer=mempo",
            "length.scorer=custom_function",
            "length.weight=0.1",
            "judge.style=api",
            f"judge.judge.url={server.url}",
            f"judge.judge.template={tmp_path / 'judge.jinja'}",
            "judge.judge.requests_per_s=200",
            "prm.style=model",
            f"prm.reward_model.folder={model}",
            "prm.reward_model.process=true",
        ]
        words = ["reward.manager=hybrid", *(f"reward.styles.{word}" for word in styles)]
        words += [f"reward.custom_function.path={tmp_path / 'custom.py'}", "reward.custom_function.kwargs.unit=2.0"]
        run = drive(tmp_path / "runs", *SMALL, "run.steps=1", *words)
    for row in read_rows(run.folder, 1).to_pylist():
        extra = json.loads(row["reward_extra_info"])
        parts = {key.removeprefix("part/"): value for key, value in extra.items() if key.startswith("part/")}
        assert (parts["length"], parts["judge"], extra["judge/judgement"]) == (2.0, 0.25, "score 0.25")
        assert 0 < parts["prm"] < 1
        assert row["score"] == pytest.approx(parts["em"] + 0.1 * 2.0 + 0.25 + parts["prm"])
        assert extra["length/length"] > 0
        assert row["rm_scores"][-1] != 0  # a process score stands at the end of each turn
    assert "reward/extra/part/prm" in step_metrics(run.folder, 1)
