"""configs/smollm2_cpu.yaml: it loads, its token arithmetic holds, and it fits the model and the data that it names."""

import os
from pathlib import Path

import pytest

from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.load import load_file
from mempo_ray.config.models import models_dir
from mempo_ray.config.schema import Config
from mempo_ray.preflight import check_names, check_token_limits, preflight

ROOT = Path(__file__).parents[3]
SHARED = Path(os.environ.get("MEMPO_SHARED", ROOT.parent / "shared")).resolve()
MISSING = [str(p) for p in (SHARED / "data", models_dir() / "smollm2", models_dir() / "minilm") if not p.is_dir()]
needs_files = pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)} (mempo-ray fetch …)")
MINUTES_OF_COLD_START = 20
TRAINED_TOKENS_PER_S = 200  # SmolLM2-135M, bfloat16 autocast, one core (docs/results.md)
TOKENS_PER_TRAJECTORY = 900  # three to four rows of about 270 tokens


@pytest.fixture
def config(monkeypatch, tmp_path) -> Config:
    monkeypatch.setenv("MEMPO_SHARED", str(SHARED))
    return load_file(str(ROOT / "configs/smollm2_cpu.yaml"), [f"run.dir={tmp_path}"])


def test_names_and_token_arithmetic_hold_with_a_question_of_200_tokens(config):
    check_names(config)
    check_token_limits(config, initial_tokens=200)


def test_the_cold_start_leaves_more_than_half_of_the_45_minutes(config):
    tokens = config.cold_start.tasks * config.cold_start.epochs * TOKENS_PER_TRAJECTORY
    assert tokens / TRAINED_TOKENS_PER_S <= 60 * MINUTES_OF_COLD_START


def test_a_bfloat16_scorer_has_the_dead_band_that_its_rounding_needs(config):
    assert config.policy.autocast == "bfloat16"
    assert config.memory_reward.min_std >= 1e-3


@needs_files
def test_the_system_prompt_names_all_four_blocks_in_few_tokens(config):
    folder = models_dir() / "smollm2"
    renderer = Renderer.from_folder(folder, FileTokenizer.from_folder(folder), config.agent)
    assert all(f"<{name}>" in config.agent.system_prompt for name in ("mem", "think", "search", "answer"))
    assert len(renderer.initial_ids("")) <= 48


@needs_files
def test_preflight_accepts_the_real_model_and_the_real_data(config):
    assert preflight(config).exit_code == 0
