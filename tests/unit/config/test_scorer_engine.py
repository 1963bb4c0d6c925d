"""Which configurations can have their memories scored by the rollout engines."""

from __future__ import annotations

import pytest

from mempo_ray.config.schema import Config
from mempo_ray.errors import ConfigError
from mempo_ray.preflight import check_token_limits


def config(memory_reward: dict | None = None, **sections: dict) -> Config:
    return Config.model_validate({"memory_reward": {"scorer_engine": "vllm", **(memory_reward or {})}, **sections})


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        ({"memory_reward": {"scorer": "reference"}}, r"set memory_reward\.scorer=live"),
        ({"run": {"deterministic": True}}, r"set run\.deterministic=false"),
        ({"rollout": {"temperature": 0.7}}, r"needs rollout\.temperature=1"),
    ],
)
def test_what_engines_cannot_score_is_refused_with_the_remedy(sections, remedy):
    with pytest.raises(ValueError, match=remedy):
        config(**sections)


@pytest.mark.parametrize(("scorer_engine", "streams"), [("policy", False), ("vllm", True)])
def test_on_shared_gpus_only_the_engines_can_score_beside_generation(scorer_engine, streams):
    settings = config({"scorer_engine": scorer_engine}, placement={"layout": "colocated"})
    assert settings.streams_scoring is streams


def test_an_engine_that_holds_no_full_history_cannot_score_it():
    agent = {"max_turns": 4, "limits": {"turn_tokens": 100, "tool_tokens": 100}}
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len: 600 holds no full history of 840 tokens"):
        check_token_limits(config(agent=agent, rollout={"max_model_len": 600}), initial_tokens=40)
    check_token_limits(config(agent=agent, rollout={"max_model_len": 1000}), initial_tokens=40)
    memories_only = config({"baseline": "question_only"}, agent=agent, rollout={"max_model_len": 600})
    check_token_limits(memories_only, initial_tokens=40)
