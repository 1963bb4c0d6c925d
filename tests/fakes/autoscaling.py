"""A Ray cluster that grows and shrinks on one machine: real GCS, raylets and autoscaler (v1), nodes as processes.

`ray.cluster_utils.AutoscalingCluster` would do, but its example file is not in the wheel, and its `start` and
`shutdown` run `ray stop --force`, which ends every Ray on the machine. This one has its own port and folder and ends
only what it started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray._private.services import get_node_ip_address
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

from tests.fakes.training import free_port

ROOT = Path(__file__).parents[2]
START_S = 90
GONE_S = 20
NODE_ID = "RAY_OVERRIDE_NODE_ID_FOR_TESTING"
QUICK_DEATHS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""A lost node is noticed in 1 to 3 s; by Ray's defaults in up to 15 s."""


class Provider(FakeMultiNodeProvider):
    """Nodes whose raylet has ended are gone, as a cloud's list of machines would say."""

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        with self.lock:
            for node_id, entry in list(self._nodes.items()):
                if "node" in entry and _has_ended(entry["node"]):
                    self.terminate_node(node_id)
        return super().non_terminated_nodes(tag_filters)


def _has_ended(node: Any) -> bool:
    return any(raylet.process.poll() is not None for raylet in node.all_processes[PROCESS_TYPE_RAYLET])


class AutoscalingCluster:
    """A head without GPUs and up to `max_nodes` nodes that the autoscaler adds when something asks for them."""

    def __init__(self, folder: Path, node: Mapping[str, float], max_nodes: int, idle_s: float, head_cpus: int) -> None:
        self.address = f"{get_node_ip_address()}:{free_port()}"
        config = folder / "autoscaling.json"
        config.write_text(json.dumps(_settings(self.address, node, max_nodes, idle_s)))
        # Ray's sockets lie in its folder, and a socket's path is at most 107 bytes long
        self._temp = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        environment = os.environ | QUICK_DEATHS | {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        options = {
            "port": self.address.rpartition(":")[2],
            "num-cpus": head_cpus,
            "num-gpus": 0,
            "autoscaling-config": config,
            "temp-dir": self._temp.name,
            "object-store-memory": 200_000_000,
            "include-dashboard": "false",
            "dashboard-agent-listen-port": 0,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        self.log = folder / "head.log"
        with self.log.open("w") as log:
            self._head = subprocess.Popen(
                [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--disable-usage-stats", *words],
                env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait(self) -> None:
        """Until the head says that it runs. Raises TimeoutError with what it said."""
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in self.log.read_text():
            if time.monotonic() > deadline or self._head.poll() is not None:
                raise TimeoutError(f"the head did not start:\n{self.log.read_text()}")
            time.sleep(0.2)

    def raylets(self) -> dict[str, psutil.Process]:
        """Processes of the added nodes' raylets, by the id of their node."""
        found = {}
        for process in self._processes():
            if process.name() == "raylet" and (node := process.environ().get(NODE_ID)):
                found[node] = process
        return found

    @property
    def folder(self) -> str:
        """Named in the command line of every process of this cluster."""
        return self._temp.name

    def close(self) -> None:
        """Ends the processes that this object started, and theirs. Idempotent."""
        if self._head.poll() is not None:
            return
        ours = [psutil.Process(self._head.pid), *self._processes()]
        for process in ours:
            _end(process)
        psutil.wait_procs(ours, timeout=GONE_S)
        self._head.wait(GONE_S)
        self._temp.cleanup()

    def _processes(self) -> list[psutil.Process]:
        return psutil.Process(self._head.pid).children(recursive=True)


def _end(process: psutil.Process) -> None:
    if process.is_running():
        process.kill()


def _settings(address: str, node: Mapping[str, float], max_nodes: int, idle_s: float) -> dict[str, Any]:
    return {
        "cluster_name": "one-machine",
        "max_workers": max_nodes,
        "idle_timeout_minutes": idle_s / 60,
        "upscaling_speed": 9999,
        "provider": {
            "type": "external",
            "module": f"{__name__}.Provider",
            "gcs_address": address,
            "launch_multiple": True,
            "use_node_id_as_ip": True,  # else a lost node is never replaced
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {"ssh_user": "x"},
        "available_node_types": {
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": dict(node), "node_config": {}, "min_workers": 0, "max_workers": max_nodes},
        },
        "head_node_type": "ray.head.default",
        "file_mounts": {}, "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [],
        "rsync_filter": [], "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
        "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
    }  # fmt: skip


@contextmanager
def autoscaling_cluster(folder: Path, **options: Any) -> Generator[AutoscalingCluster]:
    """Up when the block begins (about 8 s), gone when it ends."""
    cluster = AutoscalingCluster(folder, **options)
    try:
        cluster.wait()
        yield cluster
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.close()
