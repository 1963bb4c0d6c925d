"""A forest run as one pass gives what each of its sequences gives alone: log-probs, attention, gradients, rewards."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from mempo_ray.algo.advantage import step_advantages
from mempo_ray.algo.estimators import ScoredTrajectory
from mempo_ray.algo.memory_reward import build_request, memory_rewards
from mempo_ray.config.schema import Algorithm, MemoryReward
from mempo_ray.contracts import PayloadRef, Probe, ScoreCommand, TrajectoryBatch
from mempo_ray.training import forest
from mempo_ray.training.attention import BlockwiseTree, FlexTree, block_mask
from mempo_ray.training.forest import Pass, plan_forest
from mempo_ray.training.rank import PolicyRank
from mempo_ray.training.rows import Row
from tests.fakes.training import VOCAB, settings, train_command, trajectory, write_tiny_model
from tests.fakes.training import forest as request

FAMILIES = ("llama", "qwen2", "qwen3")


@st.composite
def random_forest(draw: st.DrawFn) -> tuple[list[Row], int]:
    """Rows that share prefixes or nothing, one-token probes, an empty history; a budget that often forces a cut."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    trunks = [rng.integers(0, VOCAB, draw(st.integers(1, 60))) for _ in range(draw(st.integers(1, 3)))]
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        trunk = draw(st.sampled_from(trunks))
        branch = rng.integers(0, VOCAB, draw(st.integers(1, 12)))
        ids = np.concatenate([trunk[: draw(st.integers(1, len(trunk)))], branch])
        start = len(ids) - draw(st.integers(1, len(branch)))
        rows.append(Row(ids, np.arange(start, len(ids)), draw(st.sampled_from([1.0, 0.6]))))
    return rows, draw(st.integers(5, 200))


def alone(model: nn.Module, row: Row) -> np.ndarray:
    """Log-probs of a row's targets from transformers' own forward of that one sequence."""
    with torch.no_grad():
        logits = model(torch.from_numpy(row.ids_T)[None]).logits[0].double() / row.temperature
    logp = torch.log_softmax(logits[row.targets_K - 1], -1)
    return logp.gather(-1, torch.from_numpy(row.ids_T[row.targets_K])[:, None])[:, 0].numpy()


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory, solo_gang) -> tuple[PolicyRank, nn.Module]:
    """A rank, and transformers' own model of the same folder in float64."""
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path_factory.mktemp(request.param), family=request.param)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return PolicyRank(settings(folder), solo_gang), reference


@hypothesis_settings(max_examples=25)
@given(case=random_forest())
def test_log_probs_of_a_forest_are_those_of_each_sequence_alone(case, models) -> None:
    (rank, reference), (rows, budget) = models, case
    rank.settings = replace(rank.settings, score_tokens=budget)
    for found, row in zip(rank._row_logprobs(rank.model, rows), rows, strict=True):
        np.testing.assert_allclose(found, alone(reference, row), atol=1e-5)


# -- kernels ------------------------------------------------------------------------------------------------


def dense(one: Pass, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The rule of `forest`, as a mask over the whole square."""
    token = torch.arange(one.num_tokens)
    sees = (token[None, :] <= token[:, None]) & (token[:, None] < torch.from_numpy(one.ends_T)[None, :])
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=0.3)


@hypothesis_settings(max_examples=20)
@given(case=random_forest(), piece=st.integers(1, 20))
def test_each_kernel_is_dense_attention_under_the_rule_forward_and_backward(case, piece) -> None:
    rows, budget = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest, "PIECE_TOKENS", piece)
        passes = plan_forest(rows, budget).passes
    torch.manual_seed(0)
    for one in passes[:2]:
        heads = (4, 2, 2)
        inputs = [torch.randn(1, h, one.num_tokens, 16, dtype=torch.float64, requires_grad=True) for h in heads]
        upstream = torch.randn(1, 4, one.num_tokens, 16, dtype=torch.float64)
        expected = dense(one, *inputs)
        expected_gradients = torch.autograd.grad((expected * upstream).sum(), inputs)
        found = BlockwiseTree(one)(*inputs, 0.3)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
        for a, b in zip(torch.autograd.grad((found * upstream).sum(), inputs), expected_gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=0)
        flex = FlexTree(one, torch.device("cpu"))(*(tensor.detach() for tensor in inputs), 0.3)  # no backward on CPU
        torch.testing.assert_close(flex, expected.detach(), atol=1e-9, rtol=0)


@given(case=random_forest(), size=st.sampled_from([2, 3, 16, 128]))
def test_the_blocks_from_the_ends_are_those_that_trying_every_pair_finds(case, size) -> None:
    for one in plan_forest(*case).passes:
        found = block_mask(one.ends_T, torch.device("cpu"), size)
        shape = (one.num_tokens, one.num_tokens)
        tried = create_block_mask(found.mask_mod, None, None, *shape, device="cpu", BLOCK_SIZE=size)
        assert found.seq_lengths == tried.seq_lengths == shape
        for kind in ("kv", "full_kv", "q", "full_q"):  # forward and backward
            assert torch.equal(listed(found, kind), listed(tried, kind))


def listed(mask: BlockMask, kind: str) -> Tensor:
    """bool [blocks, blocks]: those that a kernel is told of."""
    num, indices = getattr(mask, f"{kind}_num_blocks")[0, 0], getattr(mask, f"{kind}_indices")[0, 0]
    assert num.dtype == indices.dtype == torch.int32
    is_listed = torch.arange(indices.shape[1]) < num[:, None]
    return torch.zeros_like(indices, dtype=torch.bool).scatter(1, indices.long(), is_listed)


def test_the_blocks_of_a_long_pass_need_no_square_of_its_tokens() -> None:
    ends = np.full(200_000, 200_000)  # one trunk: 40 GB of bits, or 2.4 M pairs of blocks
    mask = block_mask(ends, torch.device("cpu"))
    assert mask.kv_num_blocks.sum() == 1_563 + 1_562  # the diagonal, and the last row of blocks, which is not whole
    assert mask.full_kv_num_blocks.sum() == 1_562 * 1_561 // 2


# -- the update ---------------------------------------------------------------------------------------------


def payloads_with_a_common_prompt() -> list[TrajectoryBatch]:
    """Every prompt opens alike, one trajectory stands there twice (with another outcome), others share nothing more."""
    payloads = [trajectory(seed, num_turns=1 + seed % 3, mask_last=seed % 2 == 1) for seed in (0, 1, 2, 3, 2)]
    for payload in payloads:
        for turn in range(len(payload)):
            payload.ragged["prompt_ids"][turn][:5] = range(5)
    return payloads


@pytest.mark.parametrize("budget", [10_000, 60])
def test_gradients_over_shared_prefixes_are_those_of_the_rows_one_by_one(
    budget, tiny_model, solo_gang, monkeypatch
) -> None:
    """KL, entropy, the sampler's correction and recomputed activations included. 1e-6: RMSNorm computes in float32
    whatever the weights are."""
    payloads = payloads_with_a_common_prompt()
    found: dict[bool, dict[str, Tensor]] = {}
    metrics = {}
    for share in (False, True):
        policy = {"micro_batch_tokens": budget, "share_prefixes": share, "activation_checkpointing": share}
        rank = PolicyRank(
            settings(tiny_model, policy=policy, algorithm={"kl_coef": 0.1, "entropy_bonus": 0.01}),
            solo_gang,
            master_dtype=torch.float64,
        )
        caught = found.setdefault(share, {})

        def catch(rank: PolicyRank = rank, caught: dict[str, Tensor] = caught) -> None:
            caught.update({n: p.grad.full_tensor().clone() for n, p in rank.model.named_parameters()})

        monkeypatch.setattr(rank.optimizer, "step", catch)
        command, _ = train_command(payloads, [1.0, -0.5, 0.3, -1.2, 0.8])
        metrics[share] = rank.run(0, command, *payloads).value
    assert max(gradient.abs().max() for gradient in found[True].values()) > 1e-3
    for name, gradient in found[False].items():
        torch.testing.assert_close(found[True][name], gradient, atol=1e-6, rtol=0)
    for name in ("policy/loss", "policy/entropy", "policy/logprob_gap_mean", "policy/num_tokens"):
        assert metrics[True][name] == pytest.approx(metrics[False][name], abs=1e-6)


# -- the reward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["question_only", "none"])
def test_equal_memories_scored_in_one_run_have_no_advantage_at_all(baseline, tiny_model, solo_gang) -> None:
    """Other histories, equal memories: one node each, so rewards are equal to the last bit."""
    switches = MemoryReward(baseline=baseline, min_std=1e-12)  # far below the noise of kernels
    prompt, memory = np.full(6, 7, np.int32), np.full(3, 9, np.int32)
    payloads, asked = [], []
    for seed in range(4):
        (written,) = trajectory(seed, num_turns=3).trajectories()
        turns = tuple(replace(turn, prompt_ids=prompt, memory_ids=memory) for turn in written.turns)
        episode = replace(written, turns=turns, probes=(Probe((1, 2, 3, 4), 1, 3),))
        payloads.append(TrajectoryBatch.from_trajectories([episode]))
        ref = PayloadRef(str(seed), None, 0)
        asked.append(build_request(episode.summary(), ref, switches, policy_version=None, deadline_s=60))
    rank = PolicyRank(settings(tiny_model), solo_gang)
    command = ScoreCommand(tuple(a.request for a in asked), tuple(range(4)))
    results = rank.run(0, command, *payloads).value
    group = [
        ScoredTrajectory(float(i % 2), 3, True, memory_rewards(a, r, switches))
        for i, (a, r) in enumerate(zip(asked, results, strict=True))
    ]
    assert len({sample.reward for trajectory in group for sample in trajectory.samples}) == 1
    (advantages,) = step_advantages([group], Algorithm(), switches)
    assert advantages.memory_GS == ((0.0,) * 3,) * 4


def test_the_update_tells_what_the_forest_has_saved_since_the_one_before(tiny_model, solo_gang) -> None:
    rank, payload = PolicyRank(settings(tiny_model), solo_gang), trajectory(0)
    requests = (request("a", payload), request("b", payload))
    assert rank.run(0, ScoreCommand(requests, (0, 0)), payload).num_passes == 1
    train, payloads = train_command([payload], [1.0])
    told = rank.run(1, train, *payloads).value
    prompt, output = (len(payload.ragged[column][0]) for column in ("prompt_ids", "output_ids"))
    assert told["scoring/num_passes"] == told["scoring/num_trunks"] == 1
    assert told["scoring/num_tokens"] == prompt + (output - 1) + 2  # the last token of a row predicts nothing
    assert told["scoring/num_plain_tokens"] == 2 * (2 * prompt + (output - 1) + 2)
    assert rank.run(2, train, *payloads).value["scoring/num_tokens"] == 0


# -- the benchmark ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_prints_the_figures_of_each_length() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "benchmarks/memory_scoring.py", "--turns", "2,4", "--group", "2", "--repeat", "1"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=True)
    two, four = json.loads(done.stdout)
    assert (two["turns"], four["turns"]) == (2, 4)
    for entry in (two, four):
        assert entry["max_abs_error"] < 1e-5
        assert entry["tokens_forest"] < entry["tokens_naive"]
        assert {"seconds_naive", "seconds_forest", "speedup", "speedup_full"} <= entry.keys()
