"""Which transport, and what a sync reports."""

from __future__ import annotations

import asyncio

import pytest

from mempo_ray.actors.weight_sync import choose_transport, sync_engines
from mempo_ray.config.schema import Config
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import DeadlineExceeded, EngineFailed, TrainingError

MANIFEST = WeightManifest(version=5, uri="/weights/5", proof=WeightProof((1, 2), (-1.0,)))


class Holder:
    """An engine's `update` that keeps what it was given, or fails."""

    def __init__(self, gap: float = 0.0, error: Exception | None = None) -> None:
        self.gap, self.error, self.manifests = gap, error, []

    async def __call__(self, manifest: WeightManifest) -> float:
        self.manifests.append(manifest)
        if self.error is not None:
            raise self.error
        return self.gap


@pytest.mark.parametrize(
    ("placement", "device", "pool", "explicit", "chosen"),
    [
        ("cpu", "cpu", (1, 1, 1), "auto", "pull"),
        ("colocated", "cuda", (2, 2, 2), "auto", "ipc"),
        ("disaggregated", "cuda", (2, 2, 2), "auto", "nccl"),
        ("disaggregated", "cuda", (1, 2, 4), "auto", "pull"),
        ("disaggregated", "cpu", (2, 2, 2), "auto", "pull"),
        ("disaggregated", "cuda", (2, 2, 2), "pull", "pull"),
        ("cpu", "cpu", (1, 1, 1), "nccl", "nccl"),
    ],
)
def test_transport(placement: str, device: str, pool: tuple[int, int, int], explicit: str, chosen: str):
    low, now, high = pool
    config = Config.model_validate(
        {
            "placement": {"layout": placement},
            "policy": {"device": device},
            "rollout": {"min_replicas": low, "replicas": now, "max_replicas": high},
            "weight_sync": {"transport": explicit},
        }
    )
    assert choose_transport(config) == chosen


async def test_every_engine_gets_the_manifest_and_the_largest_gap_is_reported():
    engines = {"a": Holder(1e-6), "b": Holder(3e-6)}
    outcome = await sync_engines(MANIFEST, engines, timeout_s=5)
    assert [engine.manifests for engine in engines.values()] == [[MANIFEST], [MANIFEST]]
    assert (outcome.report.version, outcome.report.num_engines, outcome.report.max_gap) == (5, 2, 3e-6)
    assert outcome.failed == {}


@pytest.mark.parametrize("error", [EngineFailed("gone"), DeadlineExceeded("late"), TrainingError("other weights")])
async def test_a_failed_engine_is_named_and_the_others_are_synced(error: Exception):
    outcome = await sync_engines(MANIFEST, {"a": Holder(1e-6), "b": Holder(error=error)}, timeout_s=5)
    assert outcome.report.num_engines == 1
    assert outcome.failed == {"b": str(error)}


async def test_an_engine_that_never_answers_fails_at_the_deadline():
    async def silent(manifest: WeightManifest) -> float:
        return await asyncio.get_running_loop().create_future()

    outcome = await sync_engines(MANIFEST, {"a": Holder(), "b": silent}, timeout_s=0.01)
    assert "0.01 s" in outcome.failed["b"]


@pytest.mark.parametrize(
    ("second", "kind"), [(EngineFailed("gone"), EngineFailed), (TrainingError("other weights"), TrainingError)]
)
async def test_with_no_engine_left_the_run_hears_why(second: Exception, kind: type[Exception]):
    with pytest.raises(kind, match="weights 5: a: gone; b: "):
        await sync_engines(MANIFEST, {"a": Holder(error=EngineFailed("gone")), "b": Holder(error=second)}, timeout_s=5)


async def test_a_bug_is_not_taken_for_a_dead_engine():
    with pytest.raises(KeyError):
        await sync_engines(MANIFEST, {"a": Holder(), "b": Holder(error=KeyError("bug"))}, timeout_s=5)


async def test_a_push_comes_before_the_proof_and_leaves_nothing_to_pull():
    engine, order = Holder(), []

    async def push() -> None:
        order.append(list(engine.manifests))

    await sync_engines(MANIFEST, {"a": engine}, timeout_s=5, push=push)
    assert order == [[]]
    assert [manifest.uri for manifest in engine.manifests] == [""]
