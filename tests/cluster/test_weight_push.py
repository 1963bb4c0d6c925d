"""The trainer's end of a push: every engine is taken through the steps in its own place; a failure is a value."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray

from mempo_ray.actors.weight_sync import EngineClient


@ray.remote(max_concurrency=2, num_cpus=0)
class Receiver:
    """A RolloutActor as far as a push goes. `hang_at`: the step that never ends."""

    def __init__(self, hang_at: str = "") -> None:
        self._steps: list = []
        self._hang_at = hang_at

    async def transfer(self, step: str, info: dict | None = None) -> None:
        self._steps.append((step, info))
        if step == self._hang_at:
            await asyncio.get_running_loop().create_future()

    async def steps(self) -> list:
        return self._steps


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def client_of(engines: list, gpus_per_engine: int = 1, timeout_s: float = 30) -> EngineClient:
    return EngineClient({f"e{i}": e for i, e in enumerate(engines)}, gpus_per_engine, timeout_s, is_group=False)


def test_every_engine_is_taken_through_the_steps_with_its_own_place_in_the_group():
    engines = [Receiver.remote(), Receiver.remote()]
    client = client_of(engines, gpus_per_engine=2)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 5})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    for engine, offset in zip(engines, (1, 3), strict=True):
        assert ray.get(engine.steps.remote()) == [
            ("init", {"rank_offset": offset, "world_size": 5}),
            ("start", None),
            ("update", {"names": ["w"]}),
            ("finish", None),
        ]
    assert client.failed == {}


def test_over_ipc_all_engines_get_the_same_handles():
    engines = [Receiver.remote(), Receiver.remote()]
    client_of(engines).init_weight_transfer_engine({"packed": True})
    assert [ray.get(engine.steps.remote()) for engine in engines] == [[("init", {"packed": True})]] * 2


def test_an_engine_that_never_answers_has_failed_at_the_deadline():
    client = client_of([Receiver.remote("start")], timeout_s=0.5)
    client.start_weight_update()
    assert client.failed == {"e0": "weight push, start: no answer within weight_sync.timeout_s=0.5 s"}


def test_an_engine_that_has_died_has_failed_and_the_other_goes_on():
    dead, alive = Receiver.remote(), Receiver.remote()
    ray.kill(dead)
    client = client_of([dead, alive])
    client.start_weight_update()
    client.finish_weight_update()
    assert list(client.failed) == ["e0"]
    assert [step for step, _ in ray.get(alive.steps.remote())] == ["start", "finish"]
