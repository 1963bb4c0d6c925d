"""A real Ray head as `ray start` makes it, with dashboard and token, on ports and in a folder of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
from ray.job_submission import JobStatus, JobSubmissionClient

ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)
POLL_S = 0.5


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class RayHead:
    """`ray start --head --block`; its home folder is `folder`/home. Ends with its own processes, by pid.

    Example:
        with RayHead(tmp_path) as head:
            job = head.submit(Path("."), "run.steps=2")
            head.wait_for_end(job)
    """

    def __init__(self, folder: Path, num_cpus: int = 2, token: bool = True) -> None:
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.token = secrets.token_hex(32)
        (folder / "token").write_text(self.token)
        self.port, self.dashboard_port, self.metrics_port, *others = free_ports(7)
        self.address, self.dashboard = f"127.0.0.1:{self.port}", f"http://127.0.0.1:{self.dashboard_port}"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token" if token else "disabled",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_metrics_report_interval_ms": "1000",  # else 10 s, longer than a small run
        }
        self.temp = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets lie in it: a path of at most 107 characters
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", f"--port={self.port}", f"--num-cpus={num_cpus}"),
            *("--include-dashboard=true", f"--dashboard-port={self.dashboard_port}"),
            *(f"--metrics-export-port={self.metrics_port}", "--object-store-memory=400000000"),
            *(f"--dashboard-agent-listen-port={others[0]}", f"--dashboard-agent-grpc-port={others[1]}"),
            *(f"--runtime-env-agent-port={others[2]}", f"--ray-client-server-port={others[3]}"),
            *("--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={self.temp}"),
        ]
        self.log = folder / "ray_start.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> RayHead:
        self.client = self._connect()
        return self

    def __exit__(self, *_: object) -> None:
        processes = [*self.descendants(), psutil.Process(self.process.pid)]
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)
        psutil.wait_procs(processes, timeout=30)
        shutil.rmtree(self.temp)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def get(self, path: str) -> httpx.Response:
        """Of the dashboard's API, with the token."""
        return httpx.get(f"{self.dashboard}{path}", headers=self._headers, timeout=30)

    def actors(self, run: str) -> dict[str, tuple[str, str]]:
        """(state, repr) by name, of a run's actors as the state API has them."""
        rows = self.get("/api/v0/actors?detail=1&limit=1000").json()["data"]["result"]["result"]
        return {row["name"]: (row["state"], row["repr_name"]) for row in rows if row["name"].startswith(run)}

    def scrape(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30).text

    def submit(self, source: Path, *words: str, **variables: str) -> str:
        """`ray job submit --working-dir SOURCE -- python -m mempo_ray.driver …`: the submission id."""
        return self.client.submit_job(
            entrypoint=" ".join(["python -m mempo_ray.driver", *words]),
            runtime_env={"working_dir": str(source), "env_vars": variables},
            metadata={"team": "tests"},
        )

    def log_of(self, job: str) -> str:
        return self.client.get_job_logs(job)

    def wait_for(self, job: str, text: str) -> str:
        """The log, once it holds `text`. The test's own timeout is the deadline."""
        while text not in (log := self.log_of(job)):
            assert self.client.get_job_status(job) not in ENDED, f"{job} ended without saying {text!r}:\n{log}"
            time.sleep(POLL_S)
        return log

    def wait_for_end(self, job: str) -> JobStatus:
        while (status := self.client.get_job_status(job)) not in ENDED:
            time.sleep(POLL_S)
        return status

    @property
    def _headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def _connect(self) -> JobSubmissionClient:
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.get("/api/jobs/").status_code == httpx.codes.OK:
                    return JobSubmissionClient(self.dashboard, headers=dict(self._headers))
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
