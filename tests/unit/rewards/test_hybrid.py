"""Several sources of a score in one reward: weighted, each reported, none silently left out."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from mempo_ray.actors.reward import RewardManagerWorker, longest_call_s
from mempo_ray.config.schema import Judge, Reward, Style
from mempo_ray.contracts import Scored, TrajectoryBatch, Unscored
from mempo_ray.errors import ConfigError
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.managers.hybrid import combine, parts_for
from mempo_ray.rewards.registry import load_manager
from tests.fakes import hostile_scorers
from tests.fakes.judge_server import JudgeServer
from tests.fakes.trajectories import trajectory

RESPONSE = Response("nq", (("Paris", "Paris, France"),), ("t",), "Paris")
STYLES = {"em": Style(scorer="exact_match", weight=0.8), "words": Style(scorer="f1", weight=0.2)}


def test_the_sum_is_weighted_and_each_part_is_reported():
    score = load_manager(Reward(manager="hybrid", styles=STYLES)).score(RESPONSE)
    assert score.score == 1.0
    assert score.parts == {"em": 1.0, "words": 1.0}
    assert "em/parts" in score.extra


def test_a_part_without_a_score_leaves_the_whole_without_one():
    score = combine(STYLES, {"em": Scored(1.0), "words": Unscored("late", "timeout")})
    assert score == Unscored("words: late", "timeout")


def test_process_scores_are_summed_over_the_parts_that_have_them():
    scores = {"em": Scored(1.0), "words": Scored(0.5, process_scores=(1.0, 0.5))}
    assert combine(STYLES, scores).process_scores == pytest.approx((0.2, 0.1))


def test_parts_are_chosen_by_data_source():
    styles = {"all": Style(), "math": Style(data_sources=("*math*", "aime"))}
    assert [parts_for(styles, source) for source in ("nq", "dapo-math-17k", "aime")] == [
        ["all"],
        ["all", "math"],
        ["all", "math"],
    ]
    assert combine(styles, {}).kind == "data"


def test_styles_and_the_hybrid_manager_come_together():
    with pytest.raises(ValidationError, match=r"reward\.manager=hybrid: give both, or neither"):
        Reward(styles=STYLES)
    with pytest.raises(ValidationError, match=r"style=api needs judge\.url"):
        Style(style="api")


async def test_a_worker_asks_each_part_where_it_belongs(tmp_path):
    template = tmp_path / "judge.jinja"
    template.write_text("score {{ 0.5 if answer in golds[0] else 0.25 }}")
    with JudgeServer() as server:
        styles = {
            "rule": Style(scorer="exact_match", weight=1.0),
            "process": Style(scorer="test-org/hostile", weight=10.0),
            "judge": Style(style="api", weight=100.0, judge=Judge(url=server.url, template=str(template))),
        }
        worker = RewardManagerWorker(Reward(manager="hybrid", styles=styles), [hostile_scorers.__name__])
        fine, exits = await worker.score_batch(
            TrajectoryBatch.from_trajectories([trajectory("0.5"), trajectory("exits")])
        )
        assert fine.score == 0.0 + 5.0 + 25.0
        assert fine.parts == {"rule": 0.0, "process": 0.5, "judge": 0.25}
        assert (exits.kind, exits.reason.startswith("process: ")) == ("scorer_error", True)
        await worker.close()


async def test_all_rules_share_the_worker_s_processes():
    styles = STYLES | {"hostile": Style(scorer="test-org/hostile", data_sources=("other",))}
    settings = Reward(manager="hybrid", styles=styles, isolation="process", processes=2)
    worker = RewardManagerWorker(settings, [hostile_scorers.__name__])
    scores = await asyncio.gather(*(worker.judge(RESPONSE) for _ in range(8)))
    assert [score.parts for score in scores] == [{"em": 1.0, "words": 1.0}] * 8
    assert len(await worker.pids()) == 2
    assert longest_call_s(settings) > 2 * longest_call_s(Reward(isolation="process", processes=2))
    await worker.close()


def test_a_reward_model_without_a_fleet_is_told_before_anything_is_scored():
    styles = {"rm": Style(style="model", reward_model={"folder": "x"})}
    with pytest.raises(ConfigError, match=r"reward\.styles\.rm"):
        RewardManagerWorker(Reward(manager="hybrid", styles=styles))
