"""The Ray job that this process is the driver of, if any, as `ray job submit` tells it in the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
DEFAULT_STOP_WAIT_S = 3.0  # Ray's own


@dataclass(frozen=True)
class Job:
    """What was submitted."""

    submission_id: str
    metadata: Mapping[str, str]  # the submitter's (`--metadata-json`)
    stop_wait_s: float  # from the SIGTERM of `ray job stop` to its SIGKILL

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """None where this process was not submitted."""
        metadata = json.loads(environment.get(JOB_CONFIG) or "{}").get("metadata") or {}
        if "job_submission_id" not in metadata:
            return None
        given = {key: value for key, value in metadata.items() if key not in ("job_submission_id", "job_name")}
        return cls(metadata["job_submission_id"], given, float(environment.get(STOP_WAIT) or DEFAULT_STOP_WAIT_S))


def placed(run_dir: str, environment: Mapping[str, str] = os.environ) -> str:
    """`run.dir` where it will outlive the process: URIs and absolute paths as they are, `~` as the user's home.

    A relative one lies under $MEMPO_RUN_DIR. Without it, it lies under ~/mempo-runs for a job, whose working directory
    is a copy of the submitter's that Ray deletes; for any other process in the current folder.
    """
    if "://" in run_dir:
        return run_dir
    folder = Path(run_dir).expanduser()
    if base := environment.get("MEMPO_RUN_DIR"):
        return str(Path(base).expanduser() / folder)
    return str(Path.home() / "mempo-runs" / folder) if Job.current(environment) is not None else str(folder)
