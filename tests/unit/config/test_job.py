"""Where a job writes, and what it knows of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mempo_ray.config.job import Job, placed
from mempo_ray.config.load import load_file

SUBMITTED = {
    "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(
        {"metadata": {"job_submission_id": "raysubmit_1", "job_name": "raysubmit_1", "team": "search"}}
    )
}
HOME = Path.home()


@pytest.mark.parametrize(
    ("run_dir", "environment", "expected"),
    [
        ("runs", {}, "runs"),
        ("runs", SUBMITTED, str(HOME / "mempo-runs" / "runs")),
        ("runs", SUBMITTED | {"MEMPO_RUN_DIR": "/shared"}, "/shared/runs"),
        ("runs", {"MEMPO_RUN_DIR": "~/kept"}, str(HOME / "kept" / "runs")),
        ("/data/runs", SUBMITTED | {"MEMPO_RUN_DIR": "/shared"}, "/data/runs"),
        ("~/runs", SUBMITTED, str(HOME / "runs")),
        ("s3://bucket/runs", SUBMITTED | {"MEMPO_RUN_DIR": "/shared"}, "s3://bucket/runs"),
    ],
)
def test_a_relative_folder_of_a_job_is_not_taken_in_its_working_directory(run_dir, environment, expected):
    assert placed(run_dir, environment) == expected


def test_what_is_loaded_is_placed(monkeypatch):
    monkeypatch.setenv("MEMPO_RUN_DIR", "/shared")
    assert load_file(None, ["run.dir=mine"]).run.dir == "/shared/mine"


def test_a_job_knows_its_id_the_submitters_metadata_and_the_time_to_stop():
    assert Job.current(SUBMITTED) == Job("raysubmit_1", {"team": "search"}, 3.0)
    assert Job.current(SUBMITTED | {"RAY_JOB_STOP_WAIT_TIME_S": "300"}) == Job("raysubmit_1", {"team": "search"}, 300)


@pytest.mark.parametrize("environment", [{}, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}], ids=["no Ray", "not submitted"])
def test_a_process_that_was_not_submitted_is_no_job(environment):
    assert Job.current(environment) is None
