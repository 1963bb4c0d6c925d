"""Runs as Ray jobs on a cluster that asks for a token: submitted, watched, stopped, edited, resumed, two at once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobStatus

from tests.fakes.driver_run import DriverRun, adopted_orphans, drive, read_metrics
from tests.fakes.ray_head import POLL_S, RayHead

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
QUICKSTART = (
    "cold_start=null",
    "data.tasks_per_step=4",
    "algorithm.group_size=4",
    "eval.tasks=4",
    "eval.memory_swap=false",
    "eval.probe_ratios=false",
    "reward.log_samples=0",
)
"""The quickstart from its shipped checkpoint, cut down to seconds a step."""
ROLES = ("rollout", "policy", "batch_executor", "agent_loop", "reward", "retrieval")


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Iterator[RayHead]:
    with RayHead(tmp_path_factory.mktemp("head")) as head:
        yield head


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What a user has in the folder that is submitted, to be edited."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("mempo_ray", "retrieval_index", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def said(log: str) -> list[str]:
    """What the job itself printed."""
    lines = log.splitlines()
    (entrypoint,) = (i for i, line in enumerate(lines) if line.startswith("Running entrypoint for job"))
    return lines[entrypoint + 1 :]


def run_folder(log: str) -> Path:
    return Path(said(log)[0].removeprefix("run folder: "))


def processes_of(head: RayHead) -> list[str]:
    """Titles of the actors' processes on the cluster."""
    titles = []
    for process in head.descendants():
        try:
            titles.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return [title for title in titles if title.startswith("ray::") and "Actor" in title]


def watch(head: RayHead, job: str) -> Path:
    """Its folder from the first line of its log, its actors in the state API, its metrics in the scrape."""
    log = head.wait_for(job, "step 1: sampling")
    folder = run_folder(log)
    assert folder.parent == head.home / "mempo-runs" / "runs"
    actors = head.actors(folder.name)
    assert {name.rpartition("/")[2].rpartition("-")[0] for name, (state, _) in actors.items()} <= set(ROLES)
    assert {repr_.partition("(")[0] for _, repr_ in actors.values()} >= {"RolloutActor", "PolicyWorker"}
    while not any("mempo_" in line and folder.name in line for line in head.scrape().splitlines()):
        assert head.client.get_job_status(job) == JobStatus.RUNNING, "the job ended before it was scraped"
        time.sleep(POLL_S)
    return folder


def test_a_stopped_job_leaves_a_checkpoint_and_nothing_else_and_two_at_once_finish(head: RayHead, source: Path) -> None:
    words = ("run.name=resubmitted", "run.resume=auto", *QUICKSTART)
    stopped = head.submit(source, "run.steps=1000", *words, RAY_JOB_STOP_WAIT_TIME_S="120")
    folder = watch(head, stopped)
    head.wait_for(stopped, "step 2: sampling")
    head.client.stop_job(stopped)
    assert head.wait_for_end(stopped) == JobStatus.STOPPED
    (words_of_end,) = (line for line in said(head.log_of(stopped)) if line.startswith("stopped after step"))
    step = int(words_of_end.removeprefix("stopped after step ").partition(";")[0])
    assert (folder / "checkpoints" / f"step_{step:06d}" / "COMPLETE").is_file()
    assert processes_of(head) == []
    assert {state for state, _ in head.actors(folder.name).values()} <= {"DEAD"}
    assert not Path("/dev/shm", f"mempo-{folder.name}").exists()

    edited = source / "mempo_ray" / "launch.py"
    assert "starting Ray and the actors" in edited.read_text()
    edited.write_text(edited.read_text().replace("starting Ray and the actors", "starting Ray, edited"))
    began = time.monotonic()
    resubmitted = head.submit(source, f"run.steps={step + 1}", *words)
    other = head.submit(source, "run.steps=2", *QUICKSTART)
    other_folder = watch(head, other)
    assert [head.wait_for_end(job) for job in (resubmitted, other)] == [JobStatus.SUCCEEDED] * 2
    assert time.monotonic() - began < 600
    log = head.log_of(resubmitted)
    assert "starting Ray, edited" in log
    assert f"step {step + 1}: sampling" in log
    assert f"step {step}: sampling" not in log
    assert [row["step"] for row in read_metrics(folder)] == [*range(step + 2), step + 1]
    assert json.loads((other_folder / "summary.json").read_text())["steps"] == 2
    for job, run in ((resubmitted, folder), (other, other_folder)):
        expected = {"submission_id": job, "metadata": {"team": "tests"}, "stop_wait_s": 3}
        assert json.loads((run / "job.json").read_text()) == expected


def test_a_failed_job_says_whose_failure_it_was_by_its_exit_code(head: RayHead, source: Path) -> None:
    user = head.submit(source, "rollout.temprature=1")
    unreachable = ("retrieval.backend=http", "retrieval.url=http://127.0.0.1:9/retrieve")
    infrastructure = head.submit(source, "rollout.engine=fake", *unreachable, *QUICKSTART)
    for job, code, says in ((user, 2, "Did you mean rollout.temperature?"), (infrastructure, 3, "127.0.0.1:9")):
        assert head.wait_for_end(job) == JobStatus.FAILED
        log, info = head.log_of(job), head.client.get_job_info(job)
        assert info is not None
        assert info.driver_exit_code == code, log
        assert says in log
        assert "Traceback" not in log


def test_a_step_that_outlasts_the_time_to_stop_is_given_up_for_a_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    job = json.dumps({"metadata": {"job_submission_id": "raysubmit_test"}})
    words = (*QUICKSTART, "rollout.engine=fake", "run.steps=1000", "eval.before_train=false")
    variables = {"RAY_JOB_CONFIG_JSON_ENV_VAR": job, "RAY_JOB_STOP_WAIT_TIME_S": "2"}
    with adopted_orphans(), DriverRun(tmp_path, *words, "rollout.fake_turn_s=3", **variables) as run:
        run.wait_for("step 2: sampling")
        run.process.terminate()
        assert run.finish() == 130, run.output
        assert run.left_behind == []
    assert "stopped after step 1; go on with run.resume=auto" in run.output
    assert sorted(path.parent.name for path in run.folder.glob("checkpoints/*/COMPLETE")) == [
        "step_000000",
        "step_000001",
    ]
    resumed = drive(tmp_path, *words, "run.steps=2", "run.resume=auto")  # checks that the next tasks are the recorded
    assert [row["step"] for row in read_metrics(resumed.folder)] == [0, 1, 2, 2]


@pytest.mark.parametrize("token", [None, "0" * 64], ids=["missing", "wrong"])
def test_without_the_token_a_driver_says_what_it_needs(head, token, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
    with DriverRun(tmp_path, f"placement.address={head.address}", **variables) as run:
        run.wait_for("starting Ray and the actors")
        began = time.monotonic()
        assert run.finish() == 2, run.output
        assert time.monotonic() - began < 10
    assert run.left_behind == []
    assert "Traceback" not in run.output
    for part in ("placement.address", head.address, "401", "RAY_AUTH_MODE=token", "~/.ray/auth_token"):
        assert part in run.output
