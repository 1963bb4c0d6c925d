"""Oracle trajectories become the rows that a rollout would see, and the steps that train on them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.cold_start import ColdStartReport, run_cold_start, sft_rows
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import ColdStart, Config
from mempo_ray.contracts import Passage, SftBatch
from mempo_ray.data.oracle import OracleTrajectory, oracle_trajectories
from mempo_ray.data.tasks import read_tasks
from mempo_ray.data.world import same_atlas
from mempo_ray.errors import DataError

TASKS = read_tasks("synthetic:train")[:12]
CONFIG = Config.model_validate({"agent": {"limits": {"turn_tokens": 64, "tool_tokens": 64}}})


class ExactSearch:
    """The passages that start with the query."""

    def __init__(self) -> None:
        self._passages = list(same_atlas("synthetic:train", "synthetic:eval").passages())

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [[p for p in self._passages if p.text.startswith(query)][:top_k] for query in queries]


async def no_passages(queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return [[] for _ in queries]


class Fit:
    """Takes every step; the loss falls by one each time."""

    def __init__(self) -> None:
        self.steps: list[tuple[SftBatch, float, int]] = []

    async def __call__(self, batch: SftBatch, lr: float, num_target_tokens: int) -> Mapping[str, float]:
        self.steps.append((batch, lr, num_target_tokens))
        return {"sft/loss": 100.0 - len(self.steps)}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    folder = model_folder("builtin:tiny")
    return Renderer.from_folder(folder, FileTokenizer.from_folder(folder), CONFIG.agent)


@pytest.fixture
async def trajectories() -> list[OracleTrajectory]:
    return list(await oracle_trajectories(TASKS, ExactSearch(), 3))


def rows_of(batch: SftBatch, renderer: Renderer) -> list[tuple[str, str]]:
    """(prompt, output) of each row as text."""
    decode = renderer.tokenizer.decode
    ids = (batch.ragged["prompt_ids"], batch.ragged["output_ids"])
    return [(decode(ids[0][i].tolist()), decode(ids[1][i].tolist())) for i in range(len(batch))]


def test_a_row_is_a_turn_behind_the_prompt_that_a_rollout_would_see(trajectories, renderer):
    rows = rows_of(sft_rows(trajectories, renderer, CONFIG, 0.0), renderer)
    assert len(rows) == sum(len(trajectory.turns) for trajectory in trajectories)

    first, turns = trajectories[0], len(trajectories[0].turns)
    for (prompt, output), turn in zip(rows[:turns], first.turns, strict=True):
        assert output.count("<mem>") == output.count("</mem>") == 1
        assert ("<answer>" in output) == (turn.answer is not None)
        assert ("<search>" in output) == (turn.query is not None)
        assert first.task.question.split()[0] in prompt
    assert "<tool_response>" not in rows[0][0]
    assert all("<tool_response>" in prompt for prompt, _ in rows[1:turns])


def test_only_the_last_turn_and_its_memory_reach_the_next_prompt(trajectories, renderer):
    rows = rows_of(sft_rows(trajectories, renderer, CONFIG, 0.0), renderer)
    last_prompt = rows[len(trajectories[0].turns) - 1][0]
    assert last_prompt.count("<mem>") == 1
    assert trajectories[0].facts[0].split()[-2] in last_prompt  # the first fact, by memory only


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.5, 0.5), (2.0, None)])
def test_the_probe_share_adds_seeded_rows_in_the_two_scoring_forms(share, expected, trajectories, renderer):
    plain = len(sft_rows(trajectories, renderer, CONFIG, 0.0))
    batch = sft_rows(trajectories, renderer, CONFIG, share)
    probes = [output for _, output in rows_of(batch, renderer) if output.startswith("<answer>")]
    most = 2 * len(trajectories)  # a memory context and a full history each
    assert len(batch) == plain + len(probes)
    assert len(probes) == (most if expected is None else pytest.approx(expected * plain, abs=len(trajectories)))
    golds = {trajectory.task.gold_text for trajectory in trajectories}
    assert all(re.sub(r"</?answer>|<\|end\|>", "", probe).strip() in golds for probe in probes)
    again = sft_rows(trajectories, renderer, CONFIG, share)
    assert np.array_equal(again.ragged["prompt_ids"].values, batch.ragged["prompt_ids"].values)


async def test_every_step_trains_on_whole_rows_with_the_denominator_of_its_own(renderer):
    fit, stages, advanced = Fit(), [], []
    settings = ColdStart(tasks=len(TASKS), epochs=2, batch_tokens=600, lr=1e-3)

    report = await run_cold_start(
        TASKS,
        settings,
        CONFIG,
        renderer,
        ExactSearch(),
        fit,
        lambda name, total: stages.append((name, total)),
        lambda: advanced.append(1),
    )

    num_steps = len(fit.steps)
    assert report == ColdStartReport(len(TASKS), len(TASKS), report.num_rows, num_steps, report.loss)
    assert stages == [("cold start", num_steps)]
    assert len(advanced) == num_steps > 4
    assert sum(len(batch) for batch, _, _ in fit.steps) == 2 * report.num_rows
    for batch, lr, num_target_tokens in fit.steps:
        assert len(batch.ragged["prompt_ids"].values) + len(batch.ragged["output_ids"].values) <= 600
        assert num_target_tokens == len(batch.ragged["output_ids"].values)
        assert 0 < lr <= 1e-3
    tenth = max(1, num_steps // 10)
    assert report.loss == pytest.approx(np.mean([100.0 - n for n in range(num_steps - tenth + 1, num_steps + 1)]))


async def test_a_cold_start_without_any_trajectory_says_what_is_missing(renderer):
    with pytest.raises(DataError, match=r"cold_start: the oracle kept no trajectory.*retrieval\.corpus"):
        await run_cold_start(
            TASKS, ColdStart(), CONFIG, renderer, no_passages, Fit(), lambda name, total: None, lambda: None
        )
