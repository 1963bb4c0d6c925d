"""The policy update: §5's loss, its split into micro-batches, and what it refuses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from mempo_ray.contracts import FreezeReferenceCommand, PublishCommand, ScoreCommand, SftCommand
from mempo_ray.errors import ConfigError, WorkerFailed
from mempo_ray.training.rank import PolicyRank
from mempo_ray.training.rows import policy_rows
from mempo_ray.training.step import learning_rate
from tests.fakes.training import forest, item, settings, train_command, trajectory, write_tiny_model
from tests.unit.training.test_rows import sft_batch

PAYLOADS = [trajectory(seed, num_turns=1 + seed % 3, mask_last=seed % 2 == 1) for seed in range(5)]
OUTCOMES = [1.0, -0.5, 0.3, -1.2, 0.0]
AGGREGATIONS = ("trajectory_mean", "token_mean", "trajectory_sum", "trajectory_sum_norm")


def gradients(rank: PolicyRank, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Gradients of one TrainCommand over all payloads, caught before the optimiser uses them."""
    caught: dict[str, torch.Tensor] = {}

    def catch() -> None:
        caught.update({n: p.grad.full_tensor().clone() for n, p in rank.model.named_parameters()})

    monkeypatch.setattr(rank.optimizer, "step", catch)
    command, payloads = train_command(PAYLOADS, OUTCOMES)
    rank.run(rank.next_sequence, command, *payloads)
    return caught


def plain_logprobs(model: torch.nn.Module, ids: np.ndarray, temperature: float) -> torch.Tensor:
    """log π(ids[k] | ids[:k]) for k ≥ 1, from a plain transformers forward of one sequence; float [T − 1]."""
    tokens = torch.from_numpy(ids)[None]
    logp = torch.log_softmax(model(tokens).logits[0].double() / temperature, -1)
    return logp[:-1].gather(-1, tokens[0, 1:, None])[:, 0]


@pytest.fixture
def plain_model(tiny_model) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)


def test_packed_log_probs_are_those_of_one_plain_forward_per_sequence(tiny_model, solo_gang, plain_model) -> None:
    rank = PolicyRank(settings(tiny_model, batch_executor={"micro_batch_tokens": 60}), solo_gang)
    requests = tuple(forest(f"r{i}", payload) for i, payload in enumerate(PAYLOADS))
    results = rank.run(0, ScoreCommand(requests, tuple(range(len(PAYLOADS)))), *PAYLOADS).value
    for payload, result in zip(PAYLOADS, results, strict=True):
        prompt, output = (payload.ragged[c][0].astype(np.int64) for c in ("prompt_ids", "output_ids"))
        with torch.no_grad():
            expected = plain_logprobs(plain_model, np.concatenate([prompt, output]), 1.0)[len(prompt) - 1 :]
            tail = plain_logprobs(plain_model, np.array([*prompt, 1, 2, 3]), 1.0)[-2:]
        assert result.version == 0
        assert result.logprobs[0].dtype == np.float32
        np.testing.assert_allclose(result.logprobs[0], expected, atol=1e-5)
        np.testing.assert_allclose(result.logprobs[1], tail, atol=1e-5)


def test_another_architecture_with_its_own_head_is_read_and_published_alike(solo_gang, tmp_path) -> None:
    """SmolLM2 is a Llama; large Qwen2.5 models do not tie their embeddings."""
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path / "llama", family="llama", tied=False)
    rank = PolicyRank(settings(folder), solo_gang)
    train, payloads = train_command(PAYLOADS, OUTCOMES)
    rank.run(0, train, *payloads)
    manifest = rank.run(1, PublishCommand(str(tmp_path / "v1"))).value
    assert "lm_head.weight" in manifest.tensors
    model = AutoModelForCausalLM.from_pretrained(manifest.uri, dtype=torch.float64)
    with torch.no_grad():
        expected = plain_logprobs(model, np.array(manifest.proof.ids), 1.0)
    np.testing.assert_allclose(manifest.proof.logprobs, expected, atol=1e-5)


def test_a_bad_request_among_good_ones_costs_only_itself(tiny_model, solo_gang) -> None:
    rank = PolicyRank(settings(tiny_model), solo_gang)
    requests = tuple(forest(f"r{i}", PAYLOADS[0]) for i in range(3))
    good, bad, again = rank.run(0, ScoreCommand(requests, (0, -1, 0)), PAYLOADS[0]).value
    assert "r1" in bad
    assert "has no prompt_ids[0]" in bad
    np.testing.assert_array_equal(good.logprobs[0], again.logprobs[0])


def test_a_request_for_another_version_or_a_missing_reference_is_an_error_of_its_own(tiny_model, solo_gang) -> None:
    from dataclasses import replace

    rank = PolicyRank(settings(tiny_model, algorithm={"kl_coef": 0}), solo_gang)
    request = replace(forest("r", PAYLOADS[0]), policy_version=3)
    assert rank.run(0, ScoreCommand((request,), (0,)), PAYLOADS[0]).value[0].endswith("wants version 3, not 0")
    answer = rank.run(1, ScoreCommand((request,), (0,), model="reference"), PAYLOADS[0]).value[0]
    assert "no reference" in answer


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_are_those_of_the_equation_for_each_aggregation(
    aggregation, tiny_model, solo_gang, plain_model, monkeypatch
) -> None:
    """Against §5 written out over one plain forward a turn (old = new, so r = 1; KL to equal weights = 0)."""
    tau, norm_length = 0.8, 7
    config = {"aggregation": aggregation, "norm_length": norm_length, "sampler_correction": False}
    rank = PolicyRank(
        settings(tiny_model, algorithm=config, rollout={"temperature": tau}), solo_gang, master_dtype=torch.float64
    )
    found = gradients(rank, monkeypatch)

    num, num_tokens = len(PAYLOADS), sum(int(p.ragged["output_mask"].values.sum()) for p in PAYLOADS)
    loss = torch.zeros((), dtype=torch.float64)
    for payload, outcome in zip(PAYLOADS, OUTCOMES, strict=True):
        own = int(payload.ragged["output_mask"].values.sum())
        weight = {
            "trajectory_mean": 1 / (num * own),
            "token_mean": 1 / num_tokens,
            "trajectory_sum": 1 / num,
            "trajectory_sum_norm": 1 / (num * norm_length),
        }[aggregation]
        for row in policy_rows(item(payload, outcome), payload, temperature=tau, concatenated=False):
            logp = plain_logprobs(plain_model, row.row.ids_T, tau)[row.row.targets_K - 1]
            ratio = (logp - logp.detach()).exp()
            loss = loss - weight * (ratio * torch.from_numpy(row.advantages_K)).sum()
    loss.backward()
    for name, parameter in plain_model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("budget", [26, 40, 97])
def test_any_split_into_micro_batches_has_the_same_gradient(budget, tiny_model, solo_gang, monkeypatch) -> None:
    algorithm = {"kl_coef": 0.1, "entropy_bonus": 0.01}
    whole, split = (
        gradients(
            PolicyRank(
                settings(tiny_model, policy={"micro_batch_tokens": tokens}, algorithm=algorithm),
                solo_gang,
                master_dtype=torch.float64,
            ),
            monkeypatch,
        )
        for tokens in (10_000, budget)
    )
    assert all((whole[name] - split[name]).abs().max() < 1e-6 for name in whole)
    assert any(gradient.abs().max() > 1e-3 for gradient in whole.values())


def test_several_optimiser_steps_use_old_log_probs_of_before_the_first(tiny_model, solo_gang) -> None:
    """Two mini-batches over two epochs: four steps; the ratio departs from 1, so kl_old and clips appear."""
    rank = PolicyRank(settings(tiny_model, algorithm={"epochs": 2, "mini_batches": 2}), solo_gang)
    command, payloads = train_command(PAYLOADS, OUTCOMES, mini_batch=[0, 0, 1, 1, 1])
    several = rank.run(0, command, *payloads)
    assert several.version == 1
    assert several.value["policy/num_optimizer_steps"] == 4
    assert several.value["policy/clip_share"] > 0
    assert rank.schedule_step == 4

    single = PolicyRank(settings(tiny_model), solo_gang)
    command, payloads = train_command(PAYLOADS, OUTCOMES)
    once = single.run(0, command, *payloads).value
    assert once["policy/num_optimizer_steps"] == 1
    assert once["policy/clip_share"] == once["policy/kl_old"] == 0
    # The gap is that of the sampling version in both: the old log-probs', not those of a moved policy.
    assert several.value["policy/logprob_gap_max"] == pytest.approx(once["policy/logprob_gap_max"], abs=1e-5)


def test_the_gap_is_measured_at_the_sampling_temperature_on_sampled_tokens(tiny_model, solo_gang, plain_model) -> None:
    payload, tau = PAYLOADS[1], 0.6
    rank = PolicyRank(settings(tiny_model, rollout={"temperature": tau}), solo_gang)
    command, payloads = train_command([payload], [1.0])
    metrics = rank.run(0, command, *payloads).value
    gaps = []
    for row in policy_rows(item(payload, 1.0), payload, temperature=tau, concatenated=False):
        with torch.no_grad():
            logp = plain_logprobs(plain_model, row.row.ids_T, tau)[row.row.targets_K - 1]
        gaps += (logp - torch.from_numpy(row.sampler_logprobs_K)).abs().tolist()
    assert metrics["policy/logprob_gap_max"] == pytest.approx(max(gaps), abs=1e-4)
    assert metrics["policy/logprob_gap_mean"] == pytest.approx(np.mean(gaps), abs=1e-4)
    assert metrics["policy/num_tokens"] == len(gaps)


def test_a_batch_without_advantage_takes_its_kl_step_only_and_none_without_kl(tiny_model, solo_gang) -> None:
    payloads = [trajectory(1)]
    command, _ = train_command(payloads, [0.0])
    flat = type(command)(0, (item(payloads[0], 0.0, [0.0, 0.0]),), (0,), 1, (1,))
    without = PolicyRank(settings(tiny_model, algorithm={"kl_coef": 0}), solo_gang).run(0, flat, *payloads)
    assert without.version == 0
    assert without.value["policy/num_flat_skipped"] == 1
    with_kl = PolicyRank(settings(tiny_model, algorithm={"kl_coef": 0.1}), solo_gang).run(0, flat, *payloads)
    assert with_kl.value["policy/num_optimizer_steps"] == 1


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(tiny_model, solo_gang) -> None:
    rank = PolicyRank(settings(tiny_model), solo_gang)
    before = {n: p.full_tensor().clone() for n, p in rank.model.named_parameters()}
    command, payloads = train_command(PAYLOADS, [math.nan] * 5)
    reply = rank.run(0, command, *payloads)
    assert reply.version == 0
    assert reply.value["policy/num_nonfinite_skipped"] == 1
    assert all(torch.equal(p.full_tensor(), before[n]) for n, p in rank.model.named_parameters())
    command, payloads = train_command(PAYLOADS, OUTCOMES)
    assert rank.run(1, command, *payloads).version == 1


@pytest.mark.parametrize(
    "policy", [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}, {"activation_checkpointing": True}]
)
def test_the_cheaper_forwards_train_with_float32_master_weights(policy, tiny_model, solo_gang) -> None:
    plain = PolicyRank(settings(tiny_model), solo_gang)
    rank = PolicyRank(settings(tiny_model, policy=policy), solo_gang)
    command, payloads = train_command(PAYLOADS, OUTCOMES)
    expected, found = (r.run(0, command, *payloads).value for r in (plain, rank))
    assert all(p.dtype == torch.float32 for p in rank.model.parameters())
    assert all(s["exp_avg"].dtype == torch.float32 for s in rank.optimizer.state.values())
    assert found["policy/loss"] == pytest.approx(expected["policy/loss"], abs=0.02)
    assert found["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=0.1)


def test_the_concatenated_ablation_shows_log_probs_that_were_never_sampled(tiny_model, solo_gang) -> None:
    """Sampler log-probs set to the exact ones of each turn's own prompt: per-turn rows agree, one long row does not."""
    payload = trajectory(2, num_turns=3)
    rank = PolicyRank(settings(tiny_model), solo_gang)
    rows = [r.row for r in policy_rows(item(payload, 1.0), payload, temperature=1.0, concatenated=False)]
    exact = np.concatenate(rank._row_logprobs(rank.model, rows))
    payload.ragged["output_logprobs"].values[:] = exact
    gaps = {}
    for rows_kind in ("per_turn", "concatenated"):
        trainer = PolicyRank(settings(tiny_model, algorithm={"rows": rows_kind}), solo_gang)
        command, payloads = train_command([payload], [1.0])
        gaps[rows_kind] = trainer.run(0, command, *payloads).value["policy/logprob_gap_max"]
    assert gaps["per_turn"] < 1e-5
    assert gaps["concatenated"] > 0.1


def test_supervised_steps_learn_and_raise_the_version(tiny_model, solo_gang) -> None:
    rank = PolicyRank(settings(tiny_model), solo_gang)
    batch = sft_batch(6)
    command = SftCommand(1e-2, len(batch.ragged["output_ids"].values))
    losses = [rank.run(step, command, batch).value["sft/loss"] for step in range(12)]
    assert losses[-1] < losses[0] / 2
    assert rank.version == 12
    assert rank.schedule_step == 0  # the driver sets the rate of the cold start


@pytest.mark.parametrize(
    ("family", "written", "reason"),
    [
        ("mistral", {}, "MistralAttention attends with sliding_window"),  # a window, no word of layers
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layers of sliding_attention"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "Gemma2Attention attends with softcap"),
        ("stablelm", {}, "StableLmAttention attends with no tree"),  # it keeps the caller's arguments to itself
        ("doge", {}, "DogeAttention attends with attention_mask"),  # of its own making
        ("recurrent_gemma", {}, "0 of 2 layers of a recurrent_gemma take their attention from outside"),
        ("bloom", {}, "is a bloom"),
    ],
)
def test_a_model_that_attends_as_no_tree_can_is_refused_at_its_loading(
    family, written, reason, solo_gang, tmp_path
) -> None:
    folder = write_tiny_model(tmp_path / family, family=family)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | written))
    with pytest.raises(ConfigError, match=f"policy.model: .*{reason}.*; take a model like Llama or Qwen"):
        PolicyRank(settings(folder), solo_gang)


@pytest.mark.parametrize(("layout", "times"), [("colocated", 2), ("disaggregated", 0)])
def test_a_rank_that_shares_its_gpu_gives_back_what_loading_and_each_command_held(
    layout: str, times: int, tiny_model, solo_gang, monkeypatch
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    rank = PolicyRank(settings(tiny_model, placement={"layout": layout}), solo_gang)
    rank.run(0, FreezeReferenceCommand())
    assert len(given_back) == times


def test_a_command_out_of_sequence_is_refused_before_it_runs(tiny_model, solo_gang) -> None:
    rank = PolicyRank(settings(tiny_model), solo_gang)
    with pytest.raises(WorkerFailed, match="expected command 0 and got 1"):
        rank.run(1, ScoreCommand((), ()))


def test_a_row_above_the_budget_names_the_key(tiny_model, solo_gang) -> None:
    rank = PolicyRank(settings(tiny_model, policy={"micro_batch_tokens": 4}), solo_gang)
    command, payloads = train_command(PAYLOADS, OUTCOMES)
    with pytest.raises(ConfigError, match=r"policy\.micro_batch_tokens=4"):
        rank.run(0, command, *payloads)


def test_the_learning_rate_warms_up_then_stays_or_follows_a_cosine() -> None:
    from mempo_ray.config.schema import Policy

    constant = Policy(lr=1.0, warmup_steps=4)
    assert [learning_rate(s, constant, 10) for s in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    cosine = Policy(lr=1.0, warmup_steps=2, schedule="cosine")
    assert learning_rate(2, cosine, 10) == 1.0
    assert learning_rate(6, cosine, 10) == pytest.approx(0.5)
    assert learning_rate(10, cosine, 10) == pytest.approx(0)
