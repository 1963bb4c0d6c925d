"""One real run: local Ray, vLLM, FSDP on two ranks, FAISS, reward pool, two steps. Read back from what it wrote.

The checks here use the files alone, numpy and plain transformers: none of the project's own renderer, statistics or
log-prob code, except where a test says so.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mempo_ray.algo.advantage import ScoredTrajectory, step_advantages
from mempo_ray.algo.memory_reward import MemorySample
from mempo_ray.config.schema import Algorithm, MemoryReward
from mempo_ray.observability.bottleneck import bound_by, find_bottleneck
from mempo_ray.observability.catalogue import SECTIONS, find
from tests.fakes.driver_run import SMALL, DriverRun, drive, read_metrics, read_rows, step_metrics

pytestmark = pytest.mark.timeout(400)

STEPS = (1, 2)
MAX_GAP = 1e-3
SUMMARY = (
    "em_cold_start", "em_final", "em_gain_low", "em_gain_high", "format_cold_start", "em_memory_swapped",
    "p_mem_ratio", "p_full_ratio", "seconds", "peak_pss_gb", "steps", "drift_turns", "max_logprob_gap",
)  # fmt: skip
"""Keys that the issue's first condition names."""

OTHER_RUNS = r"^rollout/end_|^scoring/(num_)?engine_|/re(covery|store)_"
"""What a run emits that ends episodes otherwise, scores in its engines, loses its ranks or is resumed."""

Row = dict


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> DriverRun:
    words = ("run.name=e2e", "run.steps=2", "policy.ranks=2", "eval.memory_swap=true", *SMALL)
    return drive(tmp_path_factory.mktemp("runs"), *words)


@pytest.fixture(scope="module")
def rows(run) -> dict[int, list[Row]]:
    return {step: read_rows(run.folder, step).to_pylist() for step in STEPS}


def trajectories(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows of each trajectory in turn order."""
    for _, turns in itertools.groupby(rows, key=lambda row: (row["task_id"], row["sibling"])):
        yield list(turns)


def groups(rows: list[Row]) -> Iterator[list[list[Row]]]:
    """Surviving trajectories of each task."""
    kept = [turns for turns in trajectories(rows) if turns[0]["excluded_because"] is None]
    for _, members in itertools.groupby(kept, key=lambda turns: turns[0]["task_id"]):
        yield list(members)


def test_it_ends_well_and_leaves_nothing_behind(run):
    assert run.process.returncode == 0
    assert run.left_behind == []
    assert not list(Path("/dev/shm").glob(f"mempo-{run.folder.name}*"))


def test_the_run_folder_holds_what_a_run_leaves_behind(run):
    assert run.folder.name.startswith("e2e-")
    assert run.folder.parent == run.runs.resolve()
    summary = json.loads((run.folder / "summary.json").read_text())
    assert [key for key in SUMMARY if key not in summary] == []
    assert summary["steps"] == 2
    assert summary["drift_turns"] == 0
    for name in ("config.yaml", "versions.json", "metrics.jsonl", "learning_curve.png", "logs/rollout-0.log"):
        assert (run.folder / name).stat().st_size > 0, name
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {"step_000001", "step_000002"}


def test_the_run_folder_holds_what_the_readme_says(run):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    first_cells = " ".join(re.findall(r"^\| (`.+?`) \|", readme, re.MULTILINE))
    named = set(re.findall(r"`(.+?)`", first_cells))
    assert {"samples.txt", "cold_start.json", "excluded.jsonl", "index/"} <= named
    assert [name for name in sorted(named - {"alarms.jsonl"}) if not list(run.folder.glob(name.rstrip("/")))] == []


def test_the_log_ends_with_the_summary_in_words_and_says_nothing_of_tokens_for_ray(run):
    log = "\n".join(run.lines)
    assert "run summary" in log
    assert "hidden_share" in log
    assert "exposed_s" in log
    assert "drift_turns" not in log
    assert "Token authentication" not in log


def test_every_number_that_was_logged_is_in_the_catalogue_and_every_step_has_a_verdict(run):
    rows = read_metrics(run.folder)
    logged = {name for row in rows for name in row}
    assert sorted(name for name in logged if find(name) is None) == []
    driver_s = [metric for section in SECTIONS for metric in section.metrics if metric.role == "driver"]
    silent = [m.name for m in driver_s if not any(m.pattern.fullmatch(name) for name in logged)]
    assert [name for name in silent if not re.search(OTHER_RUNS, name)] == []
    steps = [step_metrics(run.folder, step) for step in STEPS]
    assert all(map(find_bottleneck, steps))
    assert [line.strip() for line in run.lines if "bound by:" in line] == list(filter(None, map(bound_by, steps)))


@pytest.mark.parametrize("step", STEPS)
def test_the_log_accounts_for_every_episode(rows, step):
    keys = [(turns[0]["task_id"], turns[0]["sibling"]) for turns in trajectories(rows[step])]
    assert len(keys) == len(set(keys)) == 32
    assert len({task_id for task_id, _ in keys}) == 8
    assert all([row["turn"] for row in turns] == list(range(len(turns))) for turns in trajectories(rows[step]))


@pytest.mark.parametrize("step", STEPS)
def test_every_token_was_sampled_with_exactly_the_prompt_that_it_is_trained_with(run, rows, step):
    """Drift 0: prompt of turn t = prompt of turn 1 ++ output and tool response of turn t−1, id by id."""
    for turns in trajectories(rows[step]):
        for before, turn in itertools.pairwise(turns):
            assert turn["prompt_ids"] == turns[0]["prompt_ids"] + before["output_ids"] + before["tool_ids"]
    assert step_metrics(run.folder, step)["rollout/drift_turns"] == 0


@pytest.mark.parametrize("step", STEPS)
def test_no_row_has_an_empty_mask_and_all_tokens_are_trained(run, rows, step):
    assert all(sum(row["output_mask"]) > 0 for row in rows[step])
    assert all(len(row["output_mask"]) == len(row["output_ids"]) == len(row["output_logprobs"]) for row in rows[step])
    trained = sum(sum(row["output_mask"]) for group in groups(rows[step]) for turns in group for row in turns)
    assert step_metrics(run.folder, step)["policy/num_tokens"] == trained


def test_trainer_and_sampler_agree_before_the_first_update_and_after_a_sync(run):
    for step in STEPS:
        metrics = step_metrics(run.folder, step)
        assert metrics["policy/num_optimizer_steps"] == 1
        assert metrics["policy/grad_norm"] > 0
        assert 0 < metrics["policy/logprob_gap_max"] <= MAX_GAP
        assert metrics["sync/max_gap"] <= MAX_GAP


def test_plain_transformers_gives_the_sampler_s_log_probs_from_the_checkpoint_before(run, rows):
    """Step 2 was sampled by the weights that step 1 made: exported, synced into vLLM, and saved in the checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(run.folder / "checkpoints" / "step_000001" / "hf")
    largest = 0.0
    for row in rows[2]:
        ids, start = row["prompt_ids"] + row["output_ids"], len(row["prompt_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(row["output_ids"])[:, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(logprobs - np.array(row["output_logprobs"])).max()))
    assert largest <= MAX_GAP


def test_a_step_is_sampled_and_scored_by_one_version_and_versions_only_grow(run, rows):
    versions = []
    for step in STEPS:
        (version,) = {row["weight_version"] for row in rows[step]}
        assert {row["scorer_version"] for row in rows[step]} <= {version, None}
        assert step_metrics(run.folder, step)["sync/version"] == version + 1
        versions.append(version)
    assert versions == [versions[0], versions[0] + 1]


@pytest.mark.parametrize("step", STEPS)
def test_logged_memory_rewards_are_the_difference_of_the_logged_probabilities(rows, step):
    scored = [row for row in rows[step] if row["memory_reward"] is not None]
    assert scored, "no turn of the step has a memory sample"
    for row in scored:
        assert row["memory_ids"]
        assert 0 <= row["p_mem"] <= 1
        assert 0 <= row["p_full"] <= 1
        assert row["memory_reward"] == pytest.approx(row["p_mem"] - row["p_full"], abs=1e-12)
    assert all(row["memory_ids"] == [] for row in rows[step] if row["memory_reward"] is None)


@pytest.mark.parametrize("step", STEPS)
def test_logged_advantages_are_those_of_the_logged_scores(rows, step):
    """By algorithm.md §4 written out in numpy."""
    has_outcome = has_memory = False
    for members in groups(rows[step]):
        outcome = _standardised([turns[0]["score"] for turns in members], min_std=0.0)
        samples = [
            (g, t) for g, turns in enumerate(members) for t, r in enumerate(turns) if r["memory_reward"] is not None
        ]
        pool = _standardised([members[g][t]["memory_reward"] for g, t in samples], min_std=1e-4)
        memory = dict(zip(samples, pool, strict=True))
        for g, turns in enumerate(members):
            for t, row in enumerate(turns):
                assert row["outcome_advantage"] == pytest.approx(outcome[g], abs=1e-9)
                assert row["memory_advantage"] == pytest.approx(memory.get((g, t), 0.0), abs=1e-9)
        has_outcome |= bool(np.any(outcome))
        has_memory |= bool(np.any(pool))
    assert has_outcome, "every outcome pool of the step is flat: this run tests nothing"
    assert has_memory, "every memory pool of the step is flat: this run tests nothing"


@pytest.mark.parametrize("step", STEPS)
def test_logged_advantages_are_those_of_the_project_s_own_functions(rows, step):
    for members in groups(rows[step]):
        scored = [
            ScoredTrajectory(
                outcome=turns[0]["score"],
                num_turns=len(turns),
                format_valid=not turns[0]["format_failed"],
                samples=tuple(
                    MemorySample(
                        t, r["memory_reward"], r["p_mem"], r["p_full"], r["weight_version"], r["scorer_version"]
                    )
                    for t, r in enumerate(turns)
                    if r["memory_reward"] is not None
                ),
            )
            for turns in members
        ]
        [expected] = step_advantages([scored], Algorithm(), MemoryReward())
        for g, turns in enumerate(members):
            assert tuple(r["outcome_advantage"] for r in turns) == expected.outcome_GS[g]
            assert tuple(r["memory_advantage"] for r in turns) == expected.memory_GS[g]


@pytest.mark.parametrize("step", STEPS)
def test_a_score_is_zero_where_the_format_failed_and_exact_match_elsewhere(rows, step):
    for turns in trajectories(rows[step]):
        first = turns[0]
        if first["format_failed"] or first["answer"] is None:
            assert first["score"] == 0
        else:
            golds = json.loads(first["task"])[2]
            answer = first["answer"].lower().split()
            assert first["score"] == any(answer == alias.lower().split() for alias in golds[0])


def _memory_sample(row: Row) -> MemorySample:
    names = ("turn", "memory_reward", "p_mem", "p_full", "weight_version", "scorer_version")
    return MemorySample(*(row[name] for name in names))


def _standardised(values: list[float], min_std: float) -> np.ndarray:
    """(x − mean) / (std + 1e-6) with ddof 1; zeros where they are all equal, alone, or closer than `min_std`."""
    x = np.array(values, float)
    if len(x) < 2 or np.ptp(x) == 0 or x.std(ddof=1) < min_std:
        return np.zeros(len(x))
    return (x - x.mean()) / (x.std(ddof=1) + 1e-6)
