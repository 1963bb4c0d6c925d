"""Checkpoints and published weights of one process: exact, complete, and refused where they do not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mempo_ray.contracts import FreezeReferenceCommand, LoadCommand, PublishCommand, SaveCommand, ScoreCommand
from mempo_ray.errors import ConfigError, TrainingError
from mempo_ray.training import export as export_module
from mempo_ray.training.checkpoint import MARKER, is_complete
from mempo_ray.training.export import proof_ids
from mempo_ray.training.rank import PolicyRank
from tests.fakes.training import forest, settings, train_command, trajectory, write_tiny_model

PAYLOADS = [trajectory(seed) for seed in range(3)]


def trained(folder: Path, gang, **sections) -> PolicyRank:
    """A rank after one update and a frozen reference that differs from the folder's weights."""
    rank = PolicyRank(settings(folder, **sections), gang)
    update(rank)
    rank.run(rank.next_sequence, FreezeReferenceCommand())
    update(rank)
    return rank


def update(rank: PolicyRank) -> dict[str, float]:
    command, payloads = train_command(PAYLOADS, [1.0, -0.5, 0.2])
    metrics = rank.run(rank.next_sequence, command, *payloads).value
    return {name: value for name, value in metrics.items() if not name.endswith(("seconds", "memory_gb"))}


def weights(rank: PolicyRank) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in rank.model.named_parameters()}


def test_a_resumed_run_goes_on_bitwise_as_if_it_had_not_stopped(tiny_model, solo_gang, tmp_path) -> None:
    rank = trained(tiny_model, solo_gang)
    rank.run(rank.next_sequence, SaveCommand(str(tmp_path / "c"), {"step": 2}))
    expected = update(rank)

    resumed = PolicyRank(settings(tiny_model), solo_gang)
    reply = resumed.run(0, LoadCommand(str(tmp_path / "c")))
    assert (reply.value, reply.version, resumed.schedule_step) == ({"step": 2}, 2, 1)
    assert update(resumed) == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(rank).values(), weights(resumed).values(), strict=True))
    assert rank._checksums() == resumed._checksums()


def test_going_back_to_older_weights_takes_a_version_that_was_never_used(tiny_model, solo_gang, tmp_path) -> None:
    rank = trained(tiny_model, solo_gang)
    rank.run(rank.next_sequence, SaveCommand(str(tmp_path / "c")))
    update(rank)
    assert rank.version == 3
    assert rank.run(rank.next_sequence, LoadCommand(str(tmp_path / "c"))).version == 4
    restarted = PolicyRank(settings(tiny_model), solo_gang, version=9)
    assert restarted.run(0, LoadCommand(str(tmp_path / "c"))).version == 10


def test_log_probs_after_a_load_are_those_of_the_loaded_weights(tiny_model, solo_gang, tmp_path) -> None:
    """A forward without gradient must not leave gathered weights behind that survive the load."""
    rank = trained(tiny_model, solo_gang)
    command = ScoreCommand((forest("r", PAYLOADS[0]),), (0,))

    def score() -> np.ndarray:
        return rank.run(rank.next_sequence, command, PAYLOADS[0]).value[0].logprobs[0]

    before = score()
    rank.run(rank.next_sequence, SaveCommand(str(tmp_path / "c")))
    update(rank)
    assert abs(score() - before).max() > 1e-3
    rank.run(rank.next_sequence, LoadCommand(str(tmp_path / "c")))
    np.testing.assert_array_equal(score(), before)


def test_a_checkpoint_of_another_model_is_refused_and_both_are_named(tiny_model, solo_gang, tmp_path) -> None:
    rank = PolicyRank(settings(tiny_model), solo_gang)
    rank.run(0, SaveCommand(str(tmp_path / "c")))
    other = PolicyRank(settings(write_tiny_model(tmp_path / "other", hidden=64)), solo_gang)
    with pytest.raises(ConfigError, match=r"another model: .*hidden_size=32.*policy\.model has .*hidden_size=64"):
        other.run(0, LoadCommand(str(tmp_path / "c")))


def test_a_folder_without_its_marker_is_no_checkpoint(tiny_model, solo_gang, tmp_path) -> None:
    rank = PolicyRank(settings(tiny_model), solo_gang)
    rank.run(0, SaveCommand(str(tmp_path / "c")))
    assert is_complete(str(tmp_path / "c"))
    (tmp_path / "c" / MARKER).unlink()
    assert not is_complete(str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        rank.run(1, LoadCommand(str(tmp_path / "c")))


def test_a_reference_that_the_checkpoint_lacks_is_a_configuration_error(tiny_model, solo_gang, tmp_path) -> None:
    without = PolicyRank(settings(tiny_model, algorithm={"kl_coef": 0}), solo_gang)
    without.run(0, SaveCommand(str(tmp_path / "c")))
    with pytest.raises(ConfigError, match=r"holds no \['reference'\].*kl_coef"):
        PolicyRank(settings(tiny_model), solo_gang).run(0, LoadCommand(str(tmp_path / "c")))


@pytest.mark.parametrize("section", ["model", "optimizer", "reference", "random"])
def test_state_that_is_not_what_was_saved_ends_the_run(section, tiny_model, solo_gang, tmp_path) -> None:
    rank = PolicyRank(settings(tiny_model), solo_gang)
    rank.run(0, SaveCommand(str(tmp_path / "c")))
    facts = tmp_path / "c" / "facts.json"
    content = json.loads(facts.read_text())
    content["checksums"][section] = "0"
    facts.write_text(json.dumps(content))
    with pytest.raises(TrainingError, match=f"'{section}'"):
        rank.run(1, LoadCommand(str(tmp_path / "c")))


def test_a_checkpoint_goes_to_and_comes_from_a_uri(tiny_model, solo_gang, tmp_path) -> None:
    rank, uri = trained(tiny_model, solo_gang), f"file://{tmp_path}/c"
    rank.run(rank.next_sequence, SaveCommand(uri, {"a": 1}))
    assert is_complete(uri)
    resumed = PolicyRank(settings(tiny_model), solo_gang)
    assert resumed.run(0, LoadCommand(uri)).value == {"a": 1}
    assert resumed._checksums() == rank._checksums()


def test_published_weights_load_in_plain_transformers_with_the_proven_log_probs(
    tiny_model, solo_gang, tmp_path
) -> None:
    from transformers import AutoModelForCausalLM

    rank = trained(tiny_model, solo_gang)
    manifest = rank.run(rank.next_sequence, PublishCommand(str(tmp_path / "v2"))).value
    assert manifest.version == 2
    model = AutoModelForCausalLM.from_pretrained(manifest.uri)
    ids = torch.tensor([manifest.proof.ids])
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0, :-1].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(manifest.proof.logprobs, logp.numpy(), atol=1e-5)
    assert (tmp_path / "v2" / "tokenizer.json").is_file()
    assert not (tmp_path / "v2.partial").exists()


def test_the_manifest_names_every_tensor_once_with_its_hash(tiny_model, solo_gang, tmp_path) -> None:
    rank = trained(tiny_model, solo_gang)
    manifest = rank.run(rank.next_sequence, PublishCommand(str(tmp_path / "v2"))).value
    tensors = load_file(tmp_path / "v2" / "model.safetensors")
    assert tensors.keys() == manifest.tensors.keys()
    assert "lm_head.weight" not in tensors  # tied
    for name, tensor in tensors.items():
        info = manifest.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert info.sha256 == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert manifest.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_large_models_are_published_in_shards_that_load_again(tiny_model, solo_gang, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", 20_000)
    rank = trained(tiny_model, solo_gang)
    rank.run(rank.next_sequence, PublishCommand(str(tmp_path / "v2")))
    assert len(list((tmp_path / "v2").glob("model-0000?-of-*.safetensors"))) > 1
    again = PolicyRank(settings(tmp_path / "v2"), solo_gang)
    assert all(torch.equal(a, b) for a, b in zip(weights(rank).values(), weights(again).values(), strict=True))


def test_a_bfloat16_policy_publishes_and_proves_bfloat16_weights(tiny_model, solo_gang, tmp_path) -> None:
    rank = trained(tiny_model, solo_gang, policy={"dtype": "bfloat16"})
    manifest = rank.run(rank.next_sequence, PublishCommand(str(tmp_path / "v2"))).value
    assert {info.dtype for info in manifest.tensors.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "v2" / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(p.dtype == torch.bfloat16 for p in rank.reference.parameters())


def test_the_proof_is_a_fixed_sequence_inside_the_vocabulary() -> None:
    assert proof_ids(434)[:3] == (13, 120, 227)
    assert all(0 <= i < 90 for i in proof_ids(90))
    assert len(set(proof_ids(151_936))) == 32


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("config", "no config.json"),
        ("file", "no model.safetensors"),
        ("tensor", "no tensor"),
        ("shape", "config.json says"),
    ],
)
def test_a_damaged_model_folder_is_a_configuration_error(damage, words, solo_gang, tmp_path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    weights_file = folder / "model.safetensors"
    tensors = load_file(weights_file)
    if damage == "config":
        (folder / "config.json").unlink()
    elif damage == "file":
        weights_file.unlink()
    elif damage == "tensor":
        save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, weights_file)
    else:
        save_file({**tensors, "model.norm.weight": torch.ones(5)}, weights_file)
    with pytest.raises(ConfigError, match=words):
        PolicyRank(settings(folder), solo_gang)


def test_a_checkpoint_holds_its_weights_as_a_hugging_face_folder(tiny_model, solo_gang, tmp_path) -> None:
    rank = trained(tiny_model, solo_gang)
    rank.run(rank.next_sequence, SaveCommand(str(tmp_path / "c")))
    served = load_file(tmp_path / "c" / "hf" / "model.safetensors")
    assert all(torch.equal(served[name], tensor) for name, tensor in weights(rank).items())
    assert (tmp_path / "c" / "hf" / "tokenizer.json").is_file()
