"""Rows, packing and the supervised schedule are pure: numpy only, no torch."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from mempo_ray.contracts import Ragged, Segment, SftBatch, Slice
from mempo_ray.errors import DataError
from mempo_ray.training.rows import Limits, expand, pack, policy_rows, supervised_rows
from mempo_ray.training.sft import num_sft_steps, num_target_tokens, sft_batches, sft_lr
from tests.fakes.training import VOCAB, forest, item, trajectory


def sft_batch(num_rows: int) -> SftBatch:
    prompts = [[i] * (i % 4 + 1) for i in range(num_rows)]
    outputs = [[100 + i] * (i % 3 + 1) for i in range(num_rows)]
    return SftBatch(
        {"prompt_ids": Ragged.from_rows(prompts, np.int32), "output_ids": Ragged.from_rows(outputs, np.int32)}
    )


def test_packing_keeps_the_order_and_the_budget_and_leaves_a_longer_row_alone() -> None:
    assert pack([4, 3, 5, 9, 1], 8) == [[0, 1], [2], [3], [4]]
    assert pack([], 8) == []


def test_a_forest_expands_to_one_row_per_marked_segment_with_slices_read_from_the_payload() -> None:
    payload = trajectory(3)
    prompt, output = payload.ragged["prompt_ids"][0], payload.ragged["output_ids"][0]
    first, second = expand(forest("f", payload), payload, Limits(VOCAB, 512))
    np.testing.assert_array_equal(first.ids_T, np.concatenate([prompt, output]))
    np.testing.assert_array_equal(first.targets_K, np.arange(len(prompt), len(prompt) + len(output)))
    np.testing.assert_array_equal(second.ids_T, [*prompt, 1, 2, 3])
    np.testing.assert_array_equal(second.targets_K, [len(prompt) + 1, len(prompt) + 2])


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        (Segment(-1, Slice("prompt_ids", 99), 3, (1, 3)), "has no prompt_ids"),
        (Segment(-1, Slice("nonsense", 0), 3, (1, 3)), "has no nonsense"),
        (Segment(-1, (1, 2), 3, (1, 3)), "states 3"),
        (Segment(-1, (1, 2, 3), 3, (0, 2)), "no token to be predicted from"),
        (Segment(-1, (1, 2, 3), 3, (2, 4)), "targets 2:4"),
        (Segment(-1, tuple(range(20)), 20, (1, 2)), "the model sees 10"),
        (Segment(-1, (1, VOCAB), 2, (1, 2)), "outside the vocabulary"),
        (Segment(0, (1, 2), 2, (1, 2)), "must precede"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused_by_name(segment: Segment, words: str) -> None:
    payload = trajectory(3)
    with pytest.raises(DataError, match=words):
        expand(replace(forest("f", payload), segments=(segment,)), payload, Limits(VOCAB, 10))


def test_a_policy_row_has_its_own_prompt_and_the_memory_advantage_on_mem_tokens_only() -> None:
    payload = trajectory(3, num_turns=2, mask_last=True)
    rows = policy_rows(item(payload, 1.0, [0.5, -2.0]), payload, temperature=0.7, concatenated=False)
    assert len(rows) == 2
    for turn, (row, memory) in enumerate(zip(rows, (0.5, -2.0), strict=True)):
        prompt, output = payload.ragged["prompt_ids"][turn], payload.ragged["output_ids"][turn]
        np.testing.assert_array_equal(row.row.ids_T, np.concatenate([prompt, output]))
        np.testing.assert_array_equal(row.row.targets_K, len(prompt) + np.arange(len(output) - 1))  # last: mask 0
        np.testing.assert_allclose(row.advantages_K, [1 + memory] * 3 + [1] * (len(output) - 4))
        assert row.row.temperature == 0.7
        assert row.trajectory_tokens == payload.ragged["output_mask"].values.sum()


def test_the_concatenated_ablation_is_one_row_with_the_loss_on_every_output() -> None:
    payload = trajectory(3, num_turns=3)
    (row,) = policy_rows(item(payload, 1.0), payload, temperature=1.0, concatenated=True)
    outputs = np.concatenate([payload.ragged["output_ids"][t] for t in range(3)])
    np.testing.assert_array_equal(row.row.ids_T[row.row.targets_K], outputs)
    np.testing.assert_array_equal(row.sampler_logprobs_K, payload.ragged["output_logprobs"].values)
    assert len(row.advantages_K) == len(outputs)


def test_a_payload_with_other_turns_than_its_item_is_a_data_error() -> None:
    with pytest.raises(DataError, match="2 turns in the payload, 1 memory"):
        policy_rows(item(trajectory(3), 1.0, [0.0]), trajectory(3), temperature=1.0, concatenated=False)


def test_supervised_targets_are_the_outputs() -> None:
    rows = supervised_rows(sft_batch(3))
    assert [row.ids_T[row.targets_K].tolist() for row in rows] == [[100], [101, 101], [102, 102, 102]]


def test_supervised_batches_hold_every_row_once_an_epoch_in_a_seeded_order_within_the_budget() -> None:
    rows = sft_batch(20)
    batches = list(sft_batches(rows, 12, 2, 7))
    assert len(batches) == num_sft_steps(rows, 12, 2, 7)
    assert all(num_target_tokens(b) + len(b.ragged["prompt_ids"].values) <= 12 for b in batches)
    seen = [int(b.ragged["output_ids"][i][0]) - 100 for b in batches for i in range(len(b))]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]
    again = [int(b.ragged["output_ids"][i][0]) - 100 for b in sft_batches(rows, 12, 2, 7) for i in range(len(b))]
    assert seen == again


def test_the_supervised_rate_rises_over_the_warm_up_and_falls_to_nothing() -> None:
    rates = [sft_lr(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01
    assert sft_lr(0, 1, 2.0, 0.0) == 2.0


def test_what_the_driver_and_the_border_import_brings_no_torch() -> None:
    modules = "mempo_ray.training.sft, mempo_ray.training.rows, mempo_ray.training.settings, mempo_ray.actors.policy"
    code = f"import {modules}, sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
