"""Which transport, and what a sync reports."""

from __future__ import annotations

import asyncio

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from mempo_ray.actors.weight_sync import EngineClient, choose_transport, sync_engines
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
    assert (outcome.gaps, outcome.failed) == ({"a": 1e-6, "b": 3e-6}, {})


@pytest.mark.parametrize("error", [EngineFailed("gone"), DeadlineExceeded("late"), TrainingError("other weights")])
async def test_a_failed_engine_is_named_and_the_others_are_synced(error: Exception):
    outcome = await sync_engines(MANIFEST, {"a": Holder(1e-6), "b": Holder(error=error)}, timeout_s=5)
    assert outcome.gaps == {"a": 1e-6}
    assert outcome.failed == {"b": str(error)}


async def test_an_engine_that_never_answers_fails_at_the_deadline():
    async def silent(manifest: WeightManifest) -> float:
        return await asyncio.get_running_loop().create_future()

    outcome = await sync_engines(MANIFEST, {"a": Holder(), "b": silent}, timeout_s=0.01)
    assert "0.01 s" in outcome.failed["b"]


async def test_dead_engines_are_named_even_if_none_is_left_since_they_can_be_replaced():
    outcome = await sync_engines(MANIFEST, {"a": Holder(error=EngineFailed("gone"))}, timeout_s=5)
    assert (outcome.gaps, outcome.failed) == ({}, {"a": "gone"})


async def test_with_no_engine_left_and_one_that_holds_other_weights_the_run_ends():
    engines = {"a": Holder(error=EngineFailed("gone")), "b": Holder(error=TrainingError("other weights"))}
    with pytest.raises(TrainingError, match="weights 5: a: gone; b: other weights"):
        await sync_engines(MANIFEST, engines, timeout_s=5)


async def test_a_bug_is_not_taken_for_a_dead_engine():
    with pytest.raises(KeyError):
        await sync_engines(MANIFEST, {"a": Holder(), "b": Holder(error=KeyError("bug"))}, timeout_s=5)


async def test_a_push_comes_before_the_proof_and_leaves_nothing_to_pull():
    engine, order = Holder(), []

    async def push() -> dict[str, str]:
        order.append(list(engine.manifests))
        return {}

    await sync_engines(MANIFEST, {"a": engine}, timeout_s=5, push=push)
    assert order == [[]]
    assert [manifest.uri for manifest in engine.manifests] == [""]


async def test_after_a_push_that_failed_for_one_the_others_pull():
    failing, other = Holder(), Holder(1e-6)

    async def push() -> dict[str, str]:
        return {"a": "the actor died"}

    outcome = await sync_engines(MANIFEST, {"a": failing, "b": other}, timeout_s=5, push=push)
    assert (outcome.gaps, outcome.failed) == ({"b": 1e-6}, {"a": "the actor died"})
    assert (failing.manifests, other.manifests) == ([], [MANIFEST])


# -- the trainer's client -----------------------------------------------------------------------------------


class Receiver:
    """A RolloutActor's handle as far as a push goes; `failures` by step."""

    def __init__(self, **failures: Exception) -> None:
        self._failures, self.steps = failures, []
        self.transfer = self

    def remote(self, step: str, info: object) -> Exception | None:
        self.steps.append(step)
        return self._failures.get(step)


@pytest.fixture
def _calls_are_values(monkeypatch):
    def get(call: Exception | None, timeout: float) -> None:
        if call is not None:
            raise call

    monkeypatch.setattr(ray, "get", get)


@pytest.mark.usefixtures("_calls_are_values")
@pytest.mark.parametrize("failure", [RayActorError(), GetTimeoutError(), EngineFailed("gone")])
def test_over_ipc_an_engine_that_fails_a_step_is_left_out_and_the_others_get_their_weights(failure):
    dead, alive = Receiver(update=failure), Receiver()
    client = EngineClient({"a": dead, "b": alive}, gpus_per_engine=1, timeout_s=5, is_group=False)
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.update_weights({"names": ["v"]})
    client.finish_weight_update()
    assert list(client.failed) == ["a"]
    assert client.failed["a"].startswith("weight push, update: ")
    assert dead.steps == ["start", "update"]
    assert alive.steps == ["start", "update", "update", "finish"]


@pytest.mark.usefixtures("_calls_are_values")
def test_a_group_that_lacks_an_engine_is_not_broadcast_to():
    client = EngineClient({"a": Receiver(start=RayActorError()), "b": Receiver()}, 1, timeout_s=5, is_group=True)
    with pytest.raises(EngineFailed, match="nothing was sent"):
        client.start_weight_update()
    assert list(client.failed) == ["a"]
