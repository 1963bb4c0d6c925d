"""Trajectories survive the trip through columns, and a payload of another shape is refused."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.contracts import (
    NO_SPAN,
    EndReason,
    Probe,
    Ragged,
    SftBatch,
    Task,
    Trajectory,
    TrajectoryBatch,
    Turn,
)
from mempo_ray.errors import DataError

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda x: np.array(x, np.int32))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@st.composite
def turns(draw) -> Turn:
    output = draw(ids)
    return Turn(
        prompt_ids=draw(ids),
        output_ids=output,
        output_logprobs=-np.arange(len(output), dtype=np.float32),
        output_mask=np.ones(len(output), np.uint8),
        tool_ids=draw(ids),
        memory_ids=draw(ids),
        spans={"mem": (0, 2), "think": NO_SPAN, "search": (2, 3), "answer": NO_SPAN},
        weight_version=draw(st.integers(0, 9)),
        seed=draw(st.integers(0, 2**62)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text=draw(texts),
        query=draw(texts),
        passage_ids=tuple(draw(st.lists(texts, max_size=2))),
        tool_text=draw(texts),
    )


trajectories = st.lists(
    st.builds(
        Trajectory,
        task=st.builds(
            Task, texts, texts, st.just((("a", "b"), ("c",))), texts, st.dictionaries(texts, st.integers(), max_size=2)
        ),
        sibling=st.integers(0, 7),
        attempt=st.integers(0, 1),
        turns=st.lists(turns(), min_size=1, max_size=3).map(tuple),
        end_reason=st.sampled_from(EndReason),
        format_report=st.dictionaries(st.sampled_from(["think_paired", "mem_paired"]), st.booleans()),
        probes=st.just((Probe((1, 2, 3), 1, 2), Probe((4,), 0, 1, objective=1))),
        answer=st.none() | texts,
        detail=texts,
        num_reencoded=st.integers(0, 2),
    ),
    max_size=3,
)


def same(a: object, b: object) -> bool:
    """Equality that looks into arrays and dataclasses."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(trajectories)
def test_trajectories_come_back_from_columns(found):
    batch = TrajectoryBatch.from_trajectories(found)
    assert len(batch) == sum(len(t.turns) for t in found)
    back = batch.trajectories()
    assert all(same(a, b) for a, b in zip(found, back, strict=True))
    assert [t.summary() for t in back] == [t.summary() for t in found]


@given(trajectories)
def test_rows_of_several_payloads_join_and_part_by_task(found):
    parts = [TrajectoryBatch.from_trajectories([t]) for t in found]
    if parts:
        joined = TrajectoryBatch.concat(parts)
        assert isinstance(joined, TrajectoryBatch)
        assert all(same(a, b) for a, b in zip(found, joined.trajectories(), strict=True))


@given(trajectories)
def test_the_summary_counts_what_the_payload_holds(found):
    for trajectory in found:
        summary, batch = trajectory.summary(), TrajectoryBatch.from_trajectories([trajectory])
        for column in ("prompt", "output", "tool", "memory"):
            assert getattr(summary, f"{column}_tokens_S") == tuple(batch.ragged[f"{column}_ids"].lengths.tolist())
        assert summary.num_row_tokens == sum(int(batch.ragged[c].lengths.sum()) for c in ("prompt_ids", "output_ids"))


def test_a_missing_column_and_a_wrong_dtype_are_named():
    with pytest.raises(DataError, match=r"TrajectoryBatch.prompt_ids: expected ragged int32, got no such column"):
        TrajectoryBatch()
    rows = Ragged.from_rows([[1]], np.int64)
    with pytest.raises(DataError, match=r"SftBatch.prompt_ids: expected ragged int32, got int64 \(context\)"):
        SftBatch({"prompt_ids": rows, "output_ids": rows})
