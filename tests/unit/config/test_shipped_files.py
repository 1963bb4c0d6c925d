"""The shipped runs validate, plan on the cluster they are made for, and fit their own token limits."""

from pathlib import Path

import pytest

from mempo_ray.config.load import load_file
from mempo_ray.config.models import read_model_shape
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.shape import ClusterShape, Node, read_cluster_shape
from mempo_ray.preflight import check_names, check_token_limits

CONFIGS = Path(__file__).parents[3] / "configs"
TWO_CPUS = ClusterShape((Node(cpus=2, memory_gb=24),))
EIGHT_GPUS = read_cluster_shape(CONFIGS / "cluster" / "one_8gpu_node.yaml")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("quickstart", TWO_CPUS),
        ("smollm2_cpu", TWO_CPUS),
        ("mempo_qwen2.5_7b", EIGHT_GPUS),
        ("grpo_qwen2.5_7b", EIGHT_GPUS),
    ],
)
def test_a_shipped_run_is_planned_on_its_cluster_without_complaint(name, shape):
    config = load_file(CONFIGS / f"{name}.yaml")
    check_names(config)
    check_token_limits(config, initial_tokens=64)
    plan = make_plan(config, shape, read_model_shape(config.policy.model)).require()
    assert not [note for note in plan.notes if "estimated" in note], "more memory than the nodes have"


def test_every_shipped_run_is_tested_here():
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == {
        "quickstart",
        "smollm2_cpu",
        "mempo_qwen2.5_7b",
        "grpo_qwen2.5_7b",
    }


def test_the_comparison_differs_from_mempo_in_the_memory_reward_alone():
    mempo, grpo = (load_file(CONFIGS / f"{name}_qwen2.5_7b.yaml").model_dump() for name in ("mempo", "grpo"))
    assert grpo["memory_reward"]["weight"] == 0
    differing = {section for section in mempo if mempo[section] != grpo[section]}
    assert differing == {"run", "memory_reward"}


def test_the_paper_s_settings_are_those_of_the_file():
    config = load_file(CONFIGS / "mempo_qwen2.5_7b.yaml")
    assert (config.algorithm.group_size, config.data.tasks_per_step, config.policy.lr) == (16, 128, 1e-6)
    assert (config.agent.max_turns, config.agent.context, config.memory_reward.weight) == (16, "last_turn", 1.0)
