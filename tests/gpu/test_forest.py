"""The forest on a GPU: FlexAttention against a sequence at a time, and what it costs beside it. Needs CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mempo_ray.training.attention import FlexTree
from mempo_ray.training.forest import plan_forest
from mempo_ray.training.rank import PolicyRank
from mempo_ray.training.rows import Row
from mempo_ray.training.sharding import Gang
from tests.fakes.training import VOCAB, free_port, settings, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


def trajectory_rows(num_turns: int, seed: int) -> list[Row]:
    """A history of 30 tokens a turn with a probe of 5 behind each turn."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, VOCAB, 30 * num_turns)
    probe = rng.integers(0, VOCAB, 5)
    rows = [np.concatenate([history[: 30 * (t + 1)], probe]) for t in range(num_turns)]
    return [Row(ids, np.arange(len(ids) - 5, len(ids))) for ids in rows]


def dense(ends: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    token = torch.arange(len(ends), device=ends.device)
    sees = (token[None, :] <= token[:, None]) & (token[:, None] < ends[None, :])
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)


@pytest.mark.parametrize("num_turns", [1, 4, 12])  # passes of several lengths through one compiled program
def test_the_compiled_kernel_is_dense_attention_under_the_rule_forward_and_backward(num_turns: int) -> None:
    (one,) = plan_forest(trajectory_rows(num_turns, 0), 10_000).passes
    device = torch.device("cuda")
    torch.manual_seed(0)
    inputs = [torch.randn(1, h, one.num_tokens, 64, device=device, requires_grad=True) for h in (4, 4, 4)]
    upstream = torch.randn(1, 4, one.num_tokens, 64, device=device)
    expected, found = dense(torch.from_numpy(one.ends_T).to(device), *inputs), FlexTree(one, device)(*inputs, None)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0)  # TF32 inside the kernel
    for a, b in zip(*(torch.autograd.grad((x * upstream).sum(), inputs) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=0)


def test_a_rank_on_the_gpu_scores_a_forest_as_it_scores_each_sequence_alone(tmp_path) -> None:
    folder = write_tiny_model(
        tmp_path / "model", family="llama", hidden=128
    )  # heads of 64: the kernel needs 16 or more
    gang = Gang.join(0, 1, ("127.0.0.1", free_port()), "cuda", 60)
    try:
        rank = PolicyRank(settings(folder, policy={"device": "cuda"}), gang)
        rows = [*trajectory_rows(12, 1), *trajectory_rows(5, 2)]
        together = rank._row_logprobs(rank.model, rows)
        alone = [rank._row_logprobs(rank.model, [row])[0] for row in rows]
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-2)
    finally:
        gang.leave()
