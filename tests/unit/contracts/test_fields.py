"""Every field of every contract. A failure here means: a contract changed; decide it, then change this table."""

import dataclasses
import inspect

import pytest

from mempo_ray import contracts
from mempo_ray.contracts import SPAN_NAMES, Batch, EndReason, SftBatch, TrajectoryBatch

FIELDS = {
    "Column": "kind dtype meaning",
    "CommandReply": "sequence version value num_tokens num_passes",
    "EpisodeRequest": "task sibling seed attempt greedy forced_memory_S",
    "Finished": "summary payload",
    "FreezeReferenceCommand": "",
    "LoadCommand": "uri",
    "LogProbRequest": "id segments payload policy_version model temperature deadline_s priority affinity",
    "LogProbResult": "id version logprobs",
    "Passage": "id title text score",
    "PayloadRef": "key handle num_bytes",
    "Probe": "ids start stop objective",
    "PublishCommand": "uri",
    "PushCommand": "transport engines gpus_per_engine timeout_s",
    "Ragged": "values offsets",
    "SaveCommand": "uri extra",
    "ScoreCommand": "requests payload_index model",
    "Scored": "score extra process_scores",
    "Segment": "parent ids length targets",
    "SftCommand": "lr num_target_tokens",
    "Slice": "column row start stop",
    "StepReport": "step version metrics",
    "Task": "task_id question golds data_source metadata",
    "TensorInfo": "shape dtype sha256",
    "TrainCommand": "step items mini_batch num_mini_batches num_trajectories",
    "TrainItem": "payload summary outcome_advantage_S memory_advantage_S",
    "TrainPlan": "step policy_version items mini_batches",
    "Trajectory": (
        "task sibling attempt turns end_reason format_report probes answer detail num_reencoded tool_rewards"
    ),
    "TrajectorySummary": (
        "task_id sibling attempt end_reason detail format_valid prompt_tokens_S output_tokens_S "
        "tool_tokens_S memory_tokens_S weight_versions_S probes num_reencoded num_bytes"
    ),
    "Turn": (
        "prompt_ids output_ids output_logprobs output_mask tool_ids memory_ids spans weight_version seed "
        "finish_reason text query passage_ids tool_text"
    ),
    "Unscored": "reason kind",
    "WeightManifest": "version uri proof tensors num_bytes node",
    "WeightProof": "ids logprobs",
}

COLUMNS = {
    SftBatch: {
        "prompt_ids": "ragged int32",
        "output_ids": "ragged int32",
    },
    TrajectoryBatch: {
        "prompt_ids": "ragged int32",
        "output_ids": "ragged int32",
        "output_logprobs": "ragged float32",
        "output_mask": "ragged uint8",
        "tool_ids": "ragged int32",
        "memory_ids": "ragged int32",
        "sibling": "fixed int32",
        "turn": "fixed int32",
        "attempt": "fixed int32",
        "seed": "fixed int64",
        "weight_version": "fixed int64",
        "num_reencoded": "fixed int32",
        "mem_span": "fixed int32",
        "think_span": "fixed int32",
        "search_span": "fixed int32",
        "answer_span": "fixed int32",
        "task_id": "table string",
        "task": "table string",
        "end_reason": "table string",
        "detail": "table string",
        "format_failed": "table list<item: string>",
        "format_passed": "table list<item: string>",
        "answer": "table string",
        "probes": "table string",
        "finish_reason": "table string",
        "text": "table string",
        "query": "table string",
        "passage_ids": "table list<item: string>",
        "tool_text": "table string",
        "tool_rewards": "table string",
    },
}


def dataclasses_of_the_contracts() -> dict[str, type]:
    found = {name: getattr(contracts, name) for name in contracts.__all__}
    return {
        name: piece
        for name, piece in found.items()
        if inspect.isclass(piece) and dataclasses.is_dataclass(piece) and not issubclass(piece, Batch)
    }


def test_every_contract_has_exactly_these_fields():
    found = dataclasses_of_the_contracts()
    assert {name: [f.name for f in dataclasses.fields(piece)] for name, piece in found.items()} == {
        name: fields.split() for name, fields in FIELDS.items()
    }


@pytest.mark.parametrize("batch", COLUMNS)
def test_every_typed_batch_has_exactly_these_columns(batch):
    assert {name: f"{c.kind} {c.dtype}" for name, c in batch.SCHEMA.items()} == COLUMNS[batch]


def test_every_contract_is_frozen():
    assert [n for n, c in dataclasses_of_the_contracts().items() if not c.__dataclass_params__.frozen] == []


def test_end_reasons_and_spans():
    assert [reason.value for reason in EndReason if not reason.is_infrastructure] == [
        "answered",
        "max_turns",
        "length",
        "format_stop",
    ]
    assert [reason.value for reason in EndReason if reason.is_infrastructure] == [
        "deadline",
        "tool_failed",
        "engine_failed",
    ]
    assert SPAN_NAMES == ("mem", "think", "search", "answer")
