"""Rollout engines behind handles in process."""

from __future__ import annotations

from mempo_ray.actors.rollout import RolloutActor
from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.generation.engine import Engine
from mempo_ray.generation.fake_engine import FakeEngine
from tests.fakes.handle import FakeHandle

PROOF = WeightProof((4, 5), (-1.0,))


async def fake_engine(index: int, version: int, rollout: Rollout | None = None) -> FakeEngine:
    """Started, with proven weights; every turn is 7 8 9."""
    engine = FakeEngine(f"rollout-{index}", lambda request: (7, 8, 9), rollout or Rollout(engine="fake"), scores=True)
    await engine.start()
    await engine.update(WeightManifest(version, "", PROOF))
    return engine


def handle_of(engine: Engine, name: str = "rollout-0") -> FakeHandle:
    """A handle of the RolloutActor that holds this engine."""
    return FakeHandle(RolloutActor(name, "", Rollout(engine="fake"), WeightSync(), 9, "", engine=engine))
