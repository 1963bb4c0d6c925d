"""The engine behind a RolloutActor: token ids in, sampled token ids and their log-probs out.

    call       waits for                        on failure
    start      the model in memory              EngineFailed, ConfigError
    update     new weights loaded and proven    TrainingError: loaded, but the proof differs; EngineFailed: the rest
    generate   a turn                           EngineFailed, DeadlineExceeded; ConfigError: the prompt cannot fit
    score      log-probs of given tokens        EngineFailed, DeadlineExceeded

An engine that has proven no weights refuses to generate, so a turn never comes from weights that nobody vouched for.
`VllmEngine` is the real one, `FakeEngine` the scripted one; tests/ports/test_engine.py holds for both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import ConfigError, TrainingError
from mempo_ray.ports import GenerateRequest, Generation

NO_WEIGHTS = -1
"""`weight_version` of an engine that has proven none."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """Tokens whose log-probs behind a prefix are wanted. Both at least one token long."""

    prefix_ids: np.ndarray  # int32 [P]
    target_ids: np.ndarray  # int32 [K]


class Engine(Protocol):
    """Many requests in flight on one event loop; every method but `stats` is awaited there."""

    @property
    def weight_version(self) -> int:
        """Version of the proven weights, or NO_WEIGHTS."""
        ...

    @property
    def errored(self) -> bool:
        """The engine is dead for good: every further call raises EngineFailed."""
        ...

    async def start(self) -> None:
        """Load the model. It serves after the first `update` only.

        Raises:
            ConfigError: options that the model or the engine cannot take.
            EngineFailed: the engine died while starting; the message names its log.
        """
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, waiting out an update or a pause. The version is that of its first token.

        The same ids, seed and weights give the same tokens, whatever else is in flight. Cancelling the call frees
        its place. Greedy requests report log-probs at temperature 1, all others of logits / temperature.

        Raises:
            DeadlineExceeded: not done within `request.deadline_s`; its place is freed.
            EngineFailed: no proven weights, engine dead, or the request was ended by `abort_all`.
            ConfigError: the prompt leaves no room for a token under `rollout.max_model_len`.
        """
        ...

    async def score(
        self, continuations: Sequence[Continuation], group: str, deadline_s: float
    ) -> tuple[int, list[np.ndarray]]:
        """Log-probs of given tokens, read off the prefix cache where it has their prefixes; nothing is sampled.

        Waits out an update or a pause. Shared prefixes of one call are computed once.

        Returns:
            The version of the weights, and for each continuation float32 [K], at temperature 1: of each target token
            behind the prefix and the targets before it.

        Raises:
            DeadlineExceeded: not done within `deadline_s`; its places are freed.
            EngineFailed: no proven weights, engine dead, aborted, or the weights changed meanwhile.
            ConfigError: the engine was not built to score.
        """
        ...

    async def update(self, manifest: WeightManifest) -> float:
        """Take over the manifest's weights in place and prove them; returns the proof's largest |Δ log-prob|.

        Requests in flight are frozen meanwhile and go on with the new weights; a pause ends with it. An empty `uri`
        means that the weights were pushed by a `transfer` already and only the proof is left.

        Raises:
            TrainingError: the log-probs of the proof differ by more than `weight_sync.max_gap`.
            EngineFailed: weights missing or unreadable, deadline `weight_sync.timeout_s`, engine dead.
        After either, the engine holds no proven weights and refuses requests.
        """
        ...

    async def transfer(self, step: str, info: Mapping[str, object] | None = None) -> None:
        """One step of a push from the trainer: "init", "start", "update" or "finish" (GPU transports only)."""
        ...

    async def pause(self, *, release_memory: bool = False) -> None:
        """Freeze requests until `resume`; `release_memory` also gives weights and cache back (CUDA only)."""
        ...

    async def resume(self) -> None: ...

    async def abort_all(self) -> int:
        """End every request in flight with EngineFailed; returns how many there were."""
        ...

    def stats(self) -> dict[str, float]:
        """The load now, and counts since the start.

        now     num_in_flight, in_flight_tokens (prompt + max_tokens), num_queued (of them, waiting inside the engine),
                kv_use (share of the KV cache)
        counts  output_tokens, prompt_tokens (looked up in the prefix cache), prefix_hit_tokens (found there)
        """
        ...

    async def close(self) -> None:
        """Stop the engine and its child processes. Idempotent."""
        ...


def unproven(model_dir: str, version: int = 0) -> WeightManifest:
    """A manifest that vouches for a model folder as it lies there: what `ask` and `eval` serve, without a policy."""
    return WeightManifest(version=version, uri=model_dir, proof=WeightProof(ids=(), logprobs=()))


def check_scores(name: str, scores: bool) -> None:
    """Raises ConfigError: `Engine.score` of an engine that was not built for it."""
    if not scores:
        raise ConfigError(f"{name} was not built to score: set memory_reward.scorer_engine=vllm")


def verified_gap(proof: WeightProof, logprobs: np.ndarray | Sequence[float], max_gap: float, version: int) -> float:
    """Largest |Δ log-prob| between a proof and what the engine gives for `proof.ids[1:]`.

    Raises:
        TrainingError: above `max_gap`, not a number, or of another length.
    """
    if len(logprobs) != len(proof.logprobs):
        raise TrainingError(f"weights {version}: proof has {len(proof.logprobs)} log-probs, engine {len(logprobs)}")
    gap = float(np.max(np.abs(np.subtract(logprobs, proof.logprobs)), initial=0.0))
    if not gap <= max_gap:  # also true for NaN
        raise TrainingError(
            f"weights {version}: log-probs of the proof differ by {gap:.2e}, above weight_sync.max_gap={max_gap:g}; "
            "the engine does not hold the policy's weights (a bfloat16 engine needs weight_sync.max_gap=0.05)"
        )
    return gap


def build_engine(
    name: str,
    model_dir: str,
    rollout: Rollout,
    weight_sync: WeightSync,
    end_of_turn_id: int,
    log_file: Path,
    *,
    scores: bool = False,
) -> Engine:
    """The engine that `rollout.engine` names, not started.

    Args:
        log_file: where its output goes.
        scores: it can `score`. Scores are taken at temperature 1, so `rollout.temperature` must be 1.

    Raises:
        ConfigError: scores at another temperature.
    """
    if scores and rollout.temperature != 1:
        raise ConfigError(f"rollout.temperature={rollout.temperature:g}: an engine that scores samples at 1")
    if rollout.engine == "fake":
        from mempo_ray.generation.fake_engine import FakeEngine, TimedEngine, random_turns

        engine = TimedEngine if rollout.fake_turn_s else FakeEngine
        return engine(name, random_turns(model_dir, end_of_turn_id), rollout, scores=scores)
    os.environ.update(process_environment(rollout, weight_sync, scores))
    with output_to(log_file):  # vLLM logs while it is imported
        from mempo_ray.generation.vllm_engine import VllmEngine
    return VllmEngine(name, model_dir, rollout, weight_sync, end_of_turn_id, log_file, scores)


def process_environment(rollout: Rollout, weight_sync: WeightSync, scores: bool = False) -> dict[str, str]:
    """Variables that vLLM, OpenMP and huggingface_hub read at import or at spawn: set before vLLM is imported."""
    return {
        "OMP_NUM_THREADS": str(rollout.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with other actors
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(rollout.startup_timeout_s)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Handles of CUDA memory travel to the engine core pickled.
        **({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if weight_sync.transport == "ipc" else {}),
        # vLLM's newer model runner takes logits processors of another form than `vllm_forcing` has.
        **({"VLLM_USE_V2_MODEL_RUNNER": "0"} if scores else {}),
        # The sampler compiles one small function at the first log-prob: 15 s and 150 MB on CPU, for nothing there.
        **({"TORCHDYNAMO_DISABLE": "1"} if rollout.enforce_eager else {}),
    }


@contextmanager
def output_to(path: Path) -> Generator[None]:
    """Send this process's stdout and stderr to the end of a file; children started meanwhile keep it for life."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
