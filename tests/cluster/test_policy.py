"""PolicyWorker on real Ray: two ranks meet, obey, refuse, and do not wait for ever for a dead one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from mempo_ray.actors.policy import PolicyActor
from mempo_ray.contracts import PublishCommand, ScoreCommand, SftCommand
from mempo_ray.errors import WorkerFailed
from tests.fakes.training import forest, settings, train_command, trajectory, write_tiny_model
from tests.unit.training.test_rows import sft_batch

pytestmark = pytest.mark.slow
PAYLOADS = [trajectory(seed) for seed in range(3)]
DEADLINE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture
def gang(model: Path, cluster: None) -> Iterator[list]:
    given = settings(model, batch_executor={"command_timeout_s": 20})
    ranks = [PolicyActor.options(num_cpus=0.5).remote(given) for _ in range(2)]
    master = ray.get(ranks[0].rendezvous.remote(), timeout=DEADLINE_S)
    sizes = ray.get([rank.start.remote(i, 2, master) for i, rank in enumerate(ranks)], timeout=DEADLINE_S)
    assert sizes[0] == sizes[1] > 0
    yield ranks
    for rank in ranks:
        ray.kill(rank)


def run(gang: list, sequence: int, shares: list[tuple]) -> list:
    calls = [rank.run.remote(sequence, *share) for rank, share in zip(gang, shares, strict=True)]
    return ray.get(calls, timeout=DEADLINE_S)


def test_two_ranks_score_train_fit_and_publish_with_payloads_from_the_object_store(gang, tmp_path) -> None:
    stored = [ray.put(payload) for payload in PAYLOADS]
    scores = [
        (ScoreCommand((forest("a", PAYLOADS[0]),), (0,)), stored[0]),
        (ScoreCommand((), ()),),  # no requests: it only takes part
    ]
    replies = run(gang, 0, scores)
    assert len(replies[0].value[0].logprobs[0]) == len(PAYLOADS[0].ragged["output_ids"][0])
    assert replies[1].value == []

    shares = []
    for place in range(2):
        command, _ = train_command(PAYLOADS, [1.0, -0.5, 0.2], rank=place, world=2)
        shares.append((command, *stored[place::2]))
    replies = run(gang, 1, shares)
    assert [reply.version for reply in replies] == [1, 1]
    assert replies[0].value["policy/grad_norm"] == replies[1].value["policy/grad_norm"] > 0

    batch = sft_batch(4)
    command = SftCommand(1e-3, len(batch.ragged["output_ids"].values))
    replies = run(gang, 2, [(command, batch.slice(0, 4)), (command, batch.slice(0, 0))])
    assert [reply.version for reply in replies] == [2, 2]

    first, second = run(gang, 3, [(PublishCommand(str(tmp_path / "v2")),)] * 2)
    assert (first.value.version, second.value) == (2, None)
    assert (tmp_path / "v2" / "model.safetensors").is_file()


def test_a_wrong_sequence_number_is_refused_by_type(gang) -> None:
    with pytest.raises(WorkerFailed, match="expected command 0 and got 5"):
        run(gang, 5, [(ScoreCommand((), ()),)] * 2)


def test_a_rank_does_not_wait_for_ever_for_a_dead_one(gang) -> None:
    ray.kill(gang[1])
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get(gang[0].run.remote(0, ScoreCommand((), ())), timeout=60)
