"""What the driver and the episode need, as Protocols. Adapters over Ray actors live in `actors/`.

    episode   : Generate, Search, RunCode, Tokenizer
    driver    : Rollouts, Rewards, LogProbs, Policy, MetricSink

Every method that waits takes or owns a deadline and raises `errors.InfrastructureError` subclasses only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mempo_ray.contracts import (
    EpisodeRequest,
    Finished,
    LogProbRequest,
    LogProbResult,
    Passage,
    PayloadRef,
    Score,
    StepReport,
    TrainPlan,
    WeightManifest,
)


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """Sample one turn. `group` is the task id: engines keep a group together for their prefix cache."""

    prompt_ids: np.ndarray  # int32 [P]
    seed: int
    max_tokens: int
    group: str
    greedy: bool = False
    deadline_s: float = 120.0


@dataclass(frozen=True, eq=False)
class Generation:
    """A sampled turn: ids (end-of-turn included when reached), log-probs, and the weights that sampled it."""

    output_ids: np.ndarray  # int32 [O]
    logprobs: np.ndarray  # float32 [O], of logits / temperature
    finish_reason: str  # "stop" | "length"
    weight_version: int


class Generate(Protocol):
    """One turn from some engine. Raises EngineFailed or DeadlineExceeded after its own retries."""

    async def __call__(self, request: GenerateRequest) -> Generation: ...


class Search(Protocol):
    """Passages for each query, best first. Raises ToolFailed or DeadlineExceeded after its own retries."""

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]: ...


class RunCode(Protocol):
    """What a Python program printed, and how it ended, as a text. Raises ToolFailed where the sandbox failed."""

    async def __call__(self, source: str) -> str: ...


class Tokenizer(Protocol):
    """The few things that an episode asks of a tokenizer; no torch, no transformers behind it."""

    end_of_turn_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, tags and chat markers included, nothing added."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and, for each, the half-open range of *bytes* of UTF-8 `text` that it holds."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """UTF-8 text of the ids, special tokens included; undecodable bytes become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the id stands for; concatenated over a sequence they give its text."""
        ...


@dataclass(frozen=True)
class EngineStatus:
    """Membership of one engine. A joining engine is `stale` until it has proven the current version.

    `node` is the id of the Ray node that it runs on; '' where it is not known.
    """

    name: str
    state: str  # "starting" | "stale" | "serving" | "draining" | "dead"
    weight_version: int
    num_in_flight: int = 0
    num_restarts: int = 0
    node: str = ""


@dataclass(frozen=True)
class SyncReport:
    """A weight sync: every serving engine holds `version`. `max_gap` is the largest |Δ log-prob| of the proofs."""

    version: int
    seconds: float
    num_engines: int
    max_gap: float


class Rollouts(Protocol):
    """Episodes in, finished trajectories out, in order of completion. Membership of engines lives behind it."""

    def run(self, requests: Sequence[EpisodeRequest]) -> AsyncIterator[Finished]: ...

    async def sync(self, manifest: WeightManifest) -> SyncReport: ...

    def engines(self) -> list[EngineStatus]: ...

    async def drain(self, engine: str) -> None: ...


class Rewards(Protocol):
    """The outcome score of one trajectory. Failures of a scorer are values (`Unscored`)."""

    async def score(self, payload: PayloadRef) -> Score: ...


class LogProbs(Protocol):
    """Log-probs of a forest's marked tokens. Raises WorkerFailed, Overloaded or DeadlineExceeded per request."""

    async def __call__(self, request: LogProbRequest) -> LogProbResult: ...

    async def begin(self, num_requests: int) -> None:
        """Deterministic mode: hold the next requests until `num_requests` are here, then serve them by id."""
        ...


class Policy(Protocol):
    """The FSDP gang behind its one command queue."""

    async def train(self, plan: TrainPlan) -> StepReport: ...

    async def publish(self) -> WeightManifest:
        """Export the current version once, as an immutable snapshot."""
        ...

    async def save(self, uri: str, extra: Mapping[str, object]) -> None:
        """Write a complete checkpoint folder; the marker file comes last."""
        ...

    async def load(self, uri: str) -> Mapping[str, Any]:
        """Restore weights, optimiser, schedule, random state; returns the `extra` that was saved."""
        ...


class MetricSink(Protocol):
    """Where numbers go: the run log, the display, Ray's metrics. Names are slash-separated, units in the name."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
