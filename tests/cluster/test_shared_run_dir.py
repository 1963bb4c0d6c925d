"""Two nodes of one cluster, one of which has a file system of its own at the run's folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mempo_ray.actors.shared_folder import check_shared
from mempo_ray.config.load import build
from mempo_ray.errors import ConfigError
from tests.fakes.ray_head import POLL_S, free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

JOIN_S = 60.0
NOT_SHARED = "mount -t tmpfs none {folder} && "
MAY_MOUNT = shutil.which("unshare") and not subprocess.call(["unshare", "-m", "true"], stderr=subprocess.DEVNULL)


@dataclass(frozen=True)
class OnTwoNodes:
    """As much of a `Reservation` as is asked: the policy on one node, an engine on the other."""

    nodes: tuple[str, str]
    plan = SimpleNamespace(roles=(SimpleNamespace(name="policy", count=1), SimpleNamespace(name="rollout", count=1)))

    def options(self, role: str, index: int) -> dict[str, object]:
        node = self.nodes[("policy", "rollout").index(role)]
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


@contextmanager
def second_node(address: str, before: str) -> Iterator[None]:
    """`ray start --block` in a mount namespace of its own, in which `before` runs first."""
    ports = free_ports(3)
    start = (
        f"exec {sys.executable} -m ray.scripts.scripts start --address={address} --block --num-cpus=1 "
        f"--object-store-memory=100000000 --min-worker-port=0 --max-worker-port=0 "
        f"--dashboard-agent-listen-port={ports[0]} --dashboard-agent-grpc-port={ports[1]} "
        f"--runtime-env-agent-port={ports[2]}"
    )
    node = subprocess.Popen(["unshare", "-m", "sh", "-c", before + start], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        processes = [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]
        for process in processes:
            process.kill()
        node.wait(30)


@pytest.fixture
def two_nodes() -> Iterator[Callable[[str], OnTwoNodes]]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    with ExitStack() as stack:
        stack.callback(cluster.shutdown)

        def nodes(before: str) -> OnTwoNodes:
            stack.enter_context(second_node(cluster.address, before))
            stack.callback(ray.shutdown)
            ray.init(address=cluster.address, log_to_driver=False)
            deadline_s = time.monotonic() + JOIN_S
            while len(alive := [node["NodeID"] for node in ray.nodes() if node["Alive"]]) < 2:
                assert time.monotonic() < deadline_s, "the second node has not joined"
                time.sleep(POLL_S)
            head = ray.get_runtime_context().get_node_id()
            return OnTwoNodes((head, next(node for node in alive if node != head)))

        yield nodes


@pytest.mark.skipif(not MAY_MOUNT, reason="a mount namespace needs root")
@pytest.mark.parametrize("run_dir", ["{}", "file://{}/remote"])
async def test_a_node_that_does_not_see_the_folder_is_named_with_the_remedy(two_nodes, tmp_path: Path, run_dir) -> None:
    config = build({"run": {"dir": run_dir.format(tmp_path)}})
    with pytest.raises(ConfigError, match=r"run\.dir: .* is not shared: node [\d.]+ does not see .*NFS"):
        await check_shared(config, tmp_path, two_nodes(NOT_SHARED.format(folder=tmp_path)))


@pytest.mark.skipif(not MAY_MOUNT, reason="a mount namespace needs root")
async def test_a_shared_folder_is_left_as_it_was(two_nodes, tmp_path: Path) -> None:
    await check_shared(build({"run": {"dir": str(tmp_path)}}), tmp_path, two_nodes(""))
    assert list(tmp_path.iterdir()) == []
