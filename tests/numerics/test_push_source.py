"""What a rank sends to the engines: whole tensors under Hugging Face names, in the dtype of the forward."""

from __future__ import annotations

import pytest
import torch

from mempo_ray.actors.policy import PolicyWorker
from mempo_ray.contracts import PushCommand
from mempo_ray.errors import WorkerFailed
from mempo_ray.training.rank import PolicyRank
from tests.fakes.training import settings

COMMAND = PushCommand("nccl", {}, 1, 1.0)


def test_a_push_obeys_the_order_of_commands_and_changes_no_version(tiny_model, solo_gang) -> None:
    pushed = []
    rank = PolicyRank(settings(tiny_model), solo_gang, push=lambda *told: pushed.append(told) or {"e": "died"})
    reply = rank.run(0, COMMAND)
    assert (reply.version, reply.value) == (0, {"e": "died"})
    assert pushed == [(rank, COMMAND)]


def test_a_gang_that_cannot_push_says_so(tiny_model, solo_gang) -> None:
    with pytest.raises(WorkerFailed, match="weight_sync"):
        PolicyRank(settings(tiny_model), solo_gang).run(0, COMMAND)


def test_the_declared_tensors_are_those_that_are_sent(tiny_model, solo_gang) -> None:
    vllm_push = pytest.importorskip("mempo_ray.generation.vllm_push", reason="needs vllm")
    rank = PolicyRank(settings(tiny_model, policy={"dtype": "bfloat16"}), solo_gang)
    source = vllm_push.CastSource(rank.model, rank.forward_dtype, solo_gang.device)
    declared = [(m.name, m.dtype, m.shape) for m in source.metadata()]
    assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert {dtype for _, dtype, _ in declared} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in {name for name, _, _ in declared}


class FailingSender:
    """Gives up after the first tensor; `failed` are the engines that it blames."""

    def __init__(self, failed: dict[str, str]) -> None:
        self.failed = failed

    def send(self, source, info, client, members) -> None:
        self.source = source
        client.failed |= self.failed
        next(iter(source))
        raise RuntimeError("the group is incomplete")


def test_a_push_that_an_engine_broke_names_it_and_stays_in_step_with_the_other_ranks(tiny_model, solo_gang) -> None:
    pytest.importorskip("mempo_ray.generation.vllm_push", reason="needs vllm")
    worker = PolicyWorker(settings(tiny_model))
    worker.rendezvous = lambda: ("127.0.0.1", 1)
    worker._sender = FailingSender({"a/0": "died"})
    rank = PolicyRank(settings(tiny_model), solo_gang, push=worker._push)
    assert rank.run(0, PushCommand("nccl", {"a/0": None}, 1, 1.0)).value == {"a/0": "died"}
    assert list(worker._sender.source) == []  # the collectives of every tensor have been joined


def test_a_push_that_breaks_by_itself_is_a_bug(tiny_model, solo_gang) -> None:
    pytest.importorskip("mempo_ray.generation.vllm_push", reason="needs vllm")
    worker = PolicyWorker(settings(tiny_model))
    worker.rendezvous = lambda: ("127.0.0.1", 1)
    worker._sender = FailingSender({})
    with pytest.raises(RuntimeError, match="incomplete"):
        PolicyRank(settings(tiny_model), solo_gang, push=worker._push).run(0, COMMAND)


def test_the_group_is_formed_once_and_again_when_an_engine_was_replaced(tiny_model, solo_gang, monkeypatch) -> None:
    vllm_push = pytest.importorskip("mempo_ray.generation.vllm_push", reason="needs vllm")
    formed: list[list[str]] = []

    class Transfer:
        def __init__(self) -> None:
            self.log = [f"group {len(formed)}"]
            formed.append(self.log)

        def send_weights(self) -> None:
            self.log.append("sent")

        def shutdown(self) -> None:
            self.log.append("shut down")

    monkeypatch.setattr(vllm_push.WeightTransferTrainerFactory, "trainer_init", lambda info, client, source: Transfer())
    sender = vllm_push.WeightSender()
    for members in (["a/0"], ["a/0"], ["a/1"]):
        sender.send(None, None, None, members)
    assert formed == [["group 0", "sent", "sent", "shut down"], ["group 1", "sent"]]


def test_each_transport_brings_its_own_meeting_place() -> None:
    vllm_push = pytest.importorskip("mempo_ray.generation.vllm_push", reason="needs vllm")
    nccl = vllm_push.init_info("nccl", 0, ("10.0.0.1", 29500), num_engine_gpus=4)
    assert (nccl.master_address, nccl.master_port, nccl.world_size, nccl.is_sender) == ("10.0.0.1", 29500, 5, True)
    ipc = vllm_push.init_info("ipc", 1, ("10.0.0.1", 29500), num_engine_gpus=4)
    assert (ipc.packed, ipc.is_sender) == (True, False)
