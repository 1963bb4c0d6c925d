"""Two FSDP ranks are one process: the same commands give the same numbers, weights and checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from mempo_ray.contracts import LoadCommand, PublishCommand, SaveCommand, ScoreCommand, SftCommand
from mempo_ray.training.rank import PolicyRank
from mempo_ray.training.settings import RankSettings
from mempo_ray.training.sharding import Gang
from tests.fakes.training import forest, run_ranks, settings, train_command, trajectory
from tests.unit.training.test_rows import sft_batch

PAYLOADS = [trajectory(seed, num_turns=1 + seed % 3) for seed in range(5)]
OUTCOMES = [1.0, -0.5, 0.3, -1.2, 0.4]


def gang_settings(folder: Path) -> RankSettings:
    """Small micro-batches, so that ranks differ in their number; a large eps, so that AdamW does not blow up noise."""
    policy = {"micro_batch_tokens": 40, "eps": 1e-2, "max_grad_norm": 0.5, "schedule": "cosine", "warmup_steps": 2}
    return settings(
        folder,
        policy=policy,
        algorithm={"kl_coef": 0.05, "entropy_bonus": 0.01},
        batch_executor={"micro_batch_tokens": 30},
    )


def score(rank: PolicyRank, place: int, world: int, num: int = 5) -> list:
    """Log-probs of this rank's share of the first payloads: (payload index, one array per marked segment)."""
    own = range(place, num, world)
    requests = tuple(forest(f"r{i}", PAYLOADS[i]) for i in own)
    command = ScoreCommand(requests, tuple(range(len(requests))))
    results = rank.run(rank.next_sequence, command, *[PAYLOADS[i] for i in own]).value
    return [(i, result.logprobs) for i, result in zip(own, results, strict=True)]


def train(rank: PolicyRank, place: int, world: int, num: int = 5) -> dict[str, float]:
    mini_batch = [i % 2 for i in range(num)] if num > 1 else None
    command, payloads = train_command(PAYLOADS[:num], OUTCOMES[:num], mini_batch=mini_batch, rank=place, world=world)
    return rank.run(rank.next_sequence, command, *payloads).value


def whole(rank: PolicyRank) -> dict[str, torch.Tensor]:
    """All weights and moments, gathered."""
    state = {f"model/{n}": p.detach().full_tensor() for n, p in rank.model.named_parameters()}
    for name, p in rank.model.named_parameters():
        state |= {f"{k}/{name}": rank.optimizer.state[p][k].full_tensor() for k in ("exp_avg", "exp_avg_sq")}
    return copy.deepcopy(state)


def drive(rank: PolicyRank, place: int, world: int, out: Path) -> None:
    """One life of a gang; what it computed goes to `out/<place>.pt`. Rank 1 of 2 has no rows in two of the commands."""
    seen: dict[str, object] = {"before": score(rank, place, world), "idle": score(rank, place, world, num=1)}
    seen["update"] = train(rank, place, world)
    seen["gradient"] = whole(rank)
    seen["idle_update"] = train(rank, place, world, num=1)
    batch = sft_batch(6)
    share = batch if place == 0 else batch.slice(0, 0)
    command = SftCommand(1e-2, len(batch.ragged["output_ids"].values))
    seen["supervised"] = rank.run(rank.next_sequence, command, share).value
    rank.run(rank.next_sequence, PublishCommand(str(out / "weights")))
    seen["checksums"] = rank.run(rank.next_sequence, SaveCommand(str(out / "checkpoint"), {"position": 7})).value
    seen["saved"] = whole(rank)
    seen["later_update"] = train(rank, place, world)
    seen["after"] = score(rank, place, world)
    seen["weights"] = whole(rank)
    torch.save(seen, out / f"{place}.pt")


def one_of_two(place: int, world: int, port: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    gang = Gang.join(place, world, ("127.0.0.1", port), "cpu", 60)
    drive(PolicyRank(gang_settings(folder), gang), place, world, out)
    gang.leave()


@pytest.fixture(scope="module")
def folders(tiny_model, solo_gang, tmp_path_factory) -> tuple[Path, Path]:
    """Results of one process and of two ranks."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    drive(PolicyRank(gang_settings(tiny_model), solo_gang), 0, 1, one)
    run_ranks(2, one_of_two, tiny_model, two)
    return one, two


@pytest.fixture(scope="module")
def results(folders) -> tuple[dict, list[dict]]:
    one, two = folders
    load = lambda path: torch.load(path, weights_only=False)  # noqa: E731
    return load(one / "0.pt"), [load(two / f"{place}.pt") for place in range(2)]


@pytest.mark.parametrize(("moment", "tolerance"), [("before", 1e-5), ("idle", 1e-5), ("after", 5e-5)])
def test_log_probs_of_two_ranks_are_those_of_one_process(results, moment, tolerance) -> None:
    """After four optimiser steps the weights themselves differ by rounding (up to 1e-5, below), which adds up."""
    one, two = results
    expected = dict(one[moment])
    found = dict(two[0][moment]) | dict(two[1][moment])
    assert found.keys() == expected.keys()
    for index, segments in found.items():
        for a, b in zip(segments, expected[index], strict=True):
            assert abs(a - b).max() < tolerance


@pytest.mark.parametrize("command", ["update", "idle_update", "supervised", "later_update"])
def test_every_metric_of_two_ranks_is_that_of_one_process_even_where_one_rank_has_no_rows(results, command) -> None:
    one, two = results
    for name, value in one[command].items():
        if not name.endswith(("seconds", "peak_memory_gb", "num_passes")):  # two ranks cut their own shares
            assert [two[0][command][name], two[1][command][name]] == pytest.approx([value, value], abs=1e-5), name


@pytest.mark.parametrize("moment", ["gradient", "saved", "weights"])
def test_gradients_moments_and_weights_of_two_ranks_are_those_of_one_process(results, moment) -> None:
    one, two = results
    for name, tensor in one[moment].items():
        assert (tensor - two[0][moment][name]).abs().max() < 1e-5, name
    assert max(t.abs().max() for n, t in one["gradient"].items() if n.startswith("exp_avg/")) > 1e-3


def test_a_checkpoint_of_two_ranks_resumes_exactly_on_one(folders, results, tiny_model, solo_gang) -> None:
    _, (first, _) = results
    rank = PolicyRank(gang_settings(tiny_model), solo_gang)
    reply = rank.run(0, LoadCommand(str(folders[1] / "checkpoint")))
    assert reply.value == {"position": 7}
    assert reply.version == 3
    assert rank.schedule_step == 3
    for name, tensor in whole(rank).items():
        assert torch.equal(tensor, first["saved"][name]), name
    assert rank._checksums() == first["checksums"]
    metrics = train(rank, 0, 1)
    assert metrics["policy/loss"] == pytest.approx(first["later_update"]["policy/loss"], abs=1e-5)
    assert metrics["policy/lr"] == first["later_update"]["policy/lr"]


def test_two_ranks_publish_the_folder_that_one_process_does(folders) -> None:
    from safetensors.torch import load_file

    one, two = (load_file(folder / "weights" / "model.safetensors") for folder in folders)
    assert one.keys() == two.keys()
    assert all((one[name] - two[name]).abs().max() < 1e-5 for name in one)
