"""What an elastic pool needs of real Ray: published weights on another node, and Ray's notice that a node goes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import ray

from benchmarks import elastic
from mempo_ray.actors.calls import answer
from mempo_ray.actors.cluster import draining_nodes
from mempo_ray.actors.rollout import RolloutActor
from mempo_ray.actors.weight_sync import Snapshots
from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import EngineFailed
from mempo_ray.generation.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

DEADLINE_S = 60
ROLLOUT = Rollout(engine="fake")


@pytest.fixture(scope="module", autouse=True)
def node():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().get_node_id()
    ray.shutdown()


@ray.remote(num_cpus=0, max_concurrency=16)
class EngineOfAnotherNode(RolloutActor):
    """It does not see folders of this node, and remembers the files that its engine was given."""

    def __init__(self, logs: str) -> None:
        super().__init__(
            "rollout-0", "", ROLLOUT, WeightSync(), 2, logs, FakeEngine("rollout-0", lambda r: [2], ROLLOUT)
        )
        self.loaded: dict[str, bytes] = {}

    async def sees(self, folder: str) -> bool:
        return False

    async def update(self, manifest: WeightManifest) -> float:
        self.loaded = {path.name: path.read_bytes() for path in Path(manifest.uri).iterdir()}
        return await super().update(manifest)

    async def what_it_loaded(self) -> dict[str, bytes]:
        return self.loaded


@pytest.fixture
def published(tmp_path: Path, node: str) -> WeightManifest:
    folder = tmp_path / "000007"
    folder.mkdir()
    for number in range(2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * 300_000)
    return WeightManifest(7, str(folder), WeightProof((1, 2), (-1.0,)), node=node)


async def test_an_engine_without_the_folder_gets_its_files_through_the_object_store_and_keeps_none(published, tmp_path):
    engine = EngineOfAnotherNode.remote(str(tmp_path))
    await answer(engine.start.remote(None), "start", DEADLINE_S)
    snapshots = Snapshots(DEADLINE_S)
    for version in (7, 8):
        there = await snapshots.within_reach(replace(published, version=version), engine, "another node")
        assert there.uri != published.uri
        await answer(engine.update.remote(there), "update", DEADLINE_S)
        assert (await answer(engine.status.remote(), "status", DEADLINE_S)).weight_version == version
        assert not Path(there.uri).exists()
    files = {path.name: path.read_bytes() for path in Path(published.uri).iterdir()}
    assert await answer(engine.what_it_loaded.remote(), "files", DEADLINE_S) == files
    assert not snapshots._files


async def test_a_folder_that_is_gone_is_the_engine_s_failure_and_not_the_run_s(published, tmp_path):
    engine = EngineOfAnotherNode.remote(str(tmp_path))
    gone = replace(published, uri=str(tmp_path / "nothing"))
    with pytest.raises(EngineFailed, match="published weights"):
        await Snapshots(DEADLINE_S).within_reach(gone, engine, "another node")


async def test_on_the_folder_s_own_node_and_for_a_uri_nothing_is_carried(published):
    for manifest, where in ((published, published.node), (replace(published, uri="s3://b/7"), "another node")):
        assert await Snapshots(DEADLINE_S).within_reach(manifest, None, where) == manifest


async def test_the_benchmark_counts_every_turn_once_and_fills_its_slots(tmp_path):
    run = await elastic.measure(replicas=2, groups=2, turns=3, workers=2, logs=str(tmp_path))
    assert run.turns == 2 * elastic.GROUP_SIZE * 3
    assert 0 < run.slots_busy_share <= 1
    assert run.imbalance >= 1
    assert 0 <= run.affinity_hit_rate <= 1


NO_NOTICE, NOTICE = {"aws": (404, b""), "gcp": (200, b"FALSE")}, {"aws": (200, b"{}"), "gcp": (200, b"TRUE")}
PATHS = {"aws": "/latest/meta-data/spot/instance-action", "gcp": "/computeMetadata/v1/instance/preempted"}


class Metadata(BaseHTTPRequestHandler):
    """The metadata services of both clouds; the second question finds the notice."""

    asked: ClassVar[list[str]] = []

    def do_PUT(self) -> None:
        self.answer(200, b"token")

    def do_GET(self) -> None:
        (cloud,) = (cloud for cloud, path in PATHS.items() if path == self.path)
        assert cloud == "aws" or self.headers["Metadata-Flavor"] == "Google"
        assert cloud == "gcp" or self.headers["X-aws-ec2-metadata-token"] == "token"
        self.answer(*(NOTICE if cloud in self.asked else NO_NOTICE)[cloud])
        self.asked.append(cloud)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_cloud_s_notice_makes_ray_drain_the_node_and_that_is_known(cloud, node, metadata):
    """Last: the only node takes no new work afterwards."""
    assert cloud != "aws" or draining_nodes() == frozenset()
    notice = Path(__file__).parents[2] / "configs" / "cluster" / "spot_notice.py"
    bin_folder, address = Path(sys.executable).parent, ray.get_runtime_context().gcs_address
    variables = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "RAY_ADDRESS": address, "MEMPO_METADATA": metadata}
    subprocess.run([sys.executable, notice, cloud], check=True, timeout=DEADLINE_S, env={**os.environ, **variables})
    assert Metadata.asked.count(cloud) == 2
    assert draining_nodes() == frozenset({node})
