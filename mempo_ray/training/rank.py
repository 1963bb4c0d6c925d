"""One rank of the policy: the sharded model and everything that commands change. Plain torch, no Ray.

    run(sequence, command, *payloads) ─▶ CommandReply          every rank gets the same commands in the same order

The weight version grows by one with each TrainCommand or SftCommand that applied at least one optimiser step, and
never goes back: a load that returns to older weights takes the saved number, or the next one where that is used up.
"""

from __future__ import annotations

import importlib
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from mempo_ray.config.models import model_folder
from mempo_ray.contracts import (
    Batch,
    Command,
    CommandReply,
    FreezeReferenceCommand,
    LoadCommand,
    LogProbResult,
    PublishCommand,
    PushCommand,
    SaveCommand,
    ScoreCommand,
    SftBatch,
    SftCommand,
    TrainCommand,
    TrajectoryBatch,
    WeightManifest,
)
from mempo_ray.errors import ConfigError, DataError, TrainingError, WorkerFailed
from mempo_ray.training import checkpoint
from mempo_ray.training.export import export, prove
from mempo_ray.training.forest import plan_forest
from mempo_ray.training.logprobs import row_logprobs
from mempo_ray.training.model import architecture, checksum, copy_weights, load_model
from mempo_ray.training.rows import Limits, PolicyRow, Row, expand, policy_rows, supervised_rows
from mempo_ray.training.settings import RankSettings
from mempo_ray.training.sharding import Gang
from mempo_ray.training.step import PolicyUpdate, make_optimizer, supervised_step

SCORED = ("num_passes", "num_tokens", "num_plain_tokens", "num_trunks")

Push = Callable[["PolicyRank", PushCommand], Mapping[str, str]]
"""Sends the rank's weights, as its `forward_dtype`, to the engines; returns those that failed. Collective."""


class PolicyRank:
    """State of one rank.

    Args:
        version: the highest weight version that an earlier gang of this run has reached; a load stays above it.
        master_dtype: of the stored weights (float64 in numerics tests).
        push: how a `PushCommand` is obeyed; None where weights are pulled only.
    """

    def __init__(
        self,
        settings: RankSettings,
        gang: Gang,
        *,
        version: int = 0,
        master_dtype: torch.dtype = torch.float32,
        push: Push | None = None,
    ) -> None:
        for plugin in settings.plugins:
            importlib.import_module(plugin)
        torch.manual_seed(settings.seed)
        self.settings, self.gang, self.policy = settings, gang, settings.policy
        self.forward_dtype = torch.bfloat16 if self.policy.dtype == "bfloat16" else master_dtype
        self.folder = model_folder(self.policy.model)
        self.model = load_model(self.folder, self.policy, gang, dtype=master_dtype, trainable=True)
        self.reference = None
        if settings.needs_reference:
            # Frozen weights are only ever used in the forward's dtype, so they are kept in it.
            self.reference = load_model(self.folder, self.policy, gang, dtype=self.forward_dtype, trainable=False)
        self.optimizer = make_optimizer(self.model, self.policy)
        shape = self.model.config
        self.limits = Limits(int(shape.vocab_size), int(getattr(shape, "max_position_embeddings", 2**31)))
        self.scored: Counter[str] = Counter()  # SCORED, since the last update
        self.next_sequence = self.schedule_step = 0
        self.version = version
        self.push = push or _no_push
        self._num_tokens = self._num_passes = 0
        self._give_back()

    def run(self, sequence: int, command: Command, *payloads: Batch) -> CommandReply:
        """Obey one command.

        Raises:
            WorkerFailed: not the next sequence number; this rank saw other commands than the rest.
        """
        if sequence != self.next_sequence:
            raise WorkerFailed(
                f"rank {self.gang.rank} expected command {self.next_sequence} and got {sequence} "
                f"({type(command).__name__}); the gang must be restarted"
            )
        self.next_sequence += 1
        self._num_tokens = self._num_passes = 0
        value = self._do(command, payloads)
        self._give_back()
        return CommandReply(sequence, self.version, value, self._num_tokens, self._num_passes)

    def _give_back(self) -> None:
        """What passes held of a GPU, PyTorch keeps for the next ones: an engine that wakes up there needs it."""
        if self.settings.shares_gpu:
            torch.cuda.empty_cache()

    def _do(self, command: Command, payloads: tuple[Batch, ...]) -> object:
        match command:
            case ScoreCommand():
                return self.score(command, payloads)
            case TrainCommand():
                return self.train(command, cast(Sequence[TrajectoryBatch], payloads))
            case SftCommand():
                return self.supervise(command, cast(Sequence[SftBatch], payloads))
            case PublishCommand(uri):
                return self.publish(uri)
            case PushCommand():
                return self.push(self, command)
            case FreezeReferenceCommand():
                return self.freeze_reference()
            case SaveCommand(uri, extra):
                return self.save(uri, extra)
            case LoadCommand(uri):
                return self.load(uri)
        raise WorkerFailed(f"unknown command {type(command).__name__}")

    # -- log-probs ------------------------------------------------------------------------------------

    def score(self, command: ScoreCommand, payloads: tuple[Batch, ...]) -> list[LogProbResult | str]:
        """One result, or the words of what is wrong with it, per request. A bad request costs only itself: it is
        found before the forward, so all ranks still do the same number of passes."""
        model = self.reference if command.model == "reference" else self.model
        plans: list[list[Row] | str] = []
        for request, index in zip(command.requests, command.payload_index, strict=True):
            try:
                if model is None:
                    raise DataError(f"request {request.id}: this run keeps no reference model")
                if request.policy_version not in (None, self.version):
                    raise DataError(f"request {request.id}: wants version {request.policy_version}, not {self.version}")
                plans.append(expand(request, payloads[index] if index >= 0 else None, self.limits))
            except DataError as error:
                plans.append(str(error))
        rows = [row for plan in plans if not isinstance(plan, str) for row in plan]
        logprobs = iter(self._row_logprobs(model, rows))
        return [
            plan if isinstance(plan, str) else LogProbResult(r.id, self.version, tuple(next(logprobs) for _ in plan))
            for r, plan in zip(command.requests, plans, strict=True)
        ]

    def _row_logprobs(self, model: torch.nn.Module | None, rows: list[Row]) -> list:
        if model is None:
            return []
        plan = plan_forest(rows, self.settings.score_tokens)
        self._num_tokens, self._num_passes = plan.num_tokens, len(plan.passes)
        self.scored.update(
            num_passes=len(plan.passes),
            num_tokens=plan.num_tokens,
            num_plain_tokens=plan.num_plain_tokens,
            num_trunks=plan.num_trunks,
        )
        tensors = row_logprobs(model, plan, self.policy.autocast, self.gang)
        return [tensor.float().numpy() for tensor in tensors]

    def _scored_since_the_last_update(self) -> dict[str, float]:
        """What the forest did, over all ranks: tokens that were run, and would have been one row at a time. Trunks
        beyond one a trajectory are histories that did not continue each other. Collective."""
        totals = self.gang.sum(torch.tensor([self.scored[name] for name in SCORED], dtype=torch.int64)).tolist()
        self.scored.clear()
        return {f"scoring/{name}": float(total) for name, total in zip(SCORED, totals, strict=True)}

    # -- optimiser steps ------------------------------------------------------------------------------

    def train(self, command: TrainCommand, payloads: Sequence[TrajectoryBatch]) -> dict[str, float]:
        """Metrics of the update, equal on all ranks except seconds and memory."""
        started = time.monotonic()
        mini_batches: list[list[PolicyRow]] = [[] for _ in range(command.num_mini_batches)]
        concatenated = self.settings.algorithm.rows == "concatenated"
        for item, payload, part in zip(command.items, payloads, command.mini_batch, strict=True):
            rows = policy_rows(item, payload, temperature=self.settings.temperature, concatenated=concatenated)
            self._refuse_long_rows([r.row for r in rows])
            mini_batches[part] += rows
        update = PolicyUpdate(self.model, self.reference, self.optimizer, self.settings, self.gang)
        metrics = update.run(mini_batches, command.num_trajectories, self.schedule_step)
        self.schedule_step += command.num_mini_batches * self.settings.algorithm.epochs
        self.version += metrics["policy/num_optimizer_steps"] > 0
        return metrics | self._scored_since_the_last_update() | self._costs(started)

    def supervise(self, command: SftCommand, payloads: Sequence[SftBatch]) -> dict[str, float]:
        started = time.monotonic()
        rows = supervised_rows(payloads[0]) if payloads else []
        self._refuse_long_rows(rows)
        applied, loss = supervised_step(
            self.model,
            self.optimizer,
            rows,
            lr=command.lr,
            num_target_tokens=command.num_target_tokens,
            policy=self.policy,
            gang=self.gang,
        )
        self.version += applied.is_applied
        return {
            "sft/loss": loss,
            "sft/lr": command.lr,
            "sft/grad_norm": applied.grad_norm,
            "sft/num_nonfinite_skipped": float(not applied.is_applied),
            **{name.replace("policy/", "sft/"): value for name, value in self._costs(started).items()},
        }

    def _refuse_long_rows(self, rows: list[Row]) -> None:
        longest = max((len(row.ids_T) for row in rows), default=0)
        if longest > self.policy.micro_batch_tokens:
            raise ConfigError(
                f"policy.micro_batch_tokens={self.policy.micro_batch_tokens} is shorter than a row of {longest} "
                "tokens; raise it, or lower rollout.max_model_len"
            )

    def _costs(self, started: float) -> dict[str, float]:
        return {"policy/seconds": time.monotonic() - started, "policy/peak_memory_gb": self.peak_memory_gb}

    @property
    def peak_memory_gb(self) -> float:
        """GiB so far: device memory on CUDA, else resident memory."""
        if self.gang.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux

    # -- weights --------------------------------------------------------------------------------------

    def publish(self, uri: str) -> WeightManifest | None:
        """The manifest on rank 0, None elsewhere. Exported in the dtype of the forward, which the proof is about;
        without autocast, whose rounding an engine that holds the same weights need not share."""
        proof = prove(self.model, self.model.config.vocab_size, "none", self.gang)
        return export(
            self.model,
            self.folder,
            uri,
            dtype=self.forward_dtype,
            version=self.version,
            proof=proof,
            gang=self.gang,
        )

    def freeze_reference(self) -> str:
        """The present weights become π_ref, where one is needed; optimiser and schedule start anew.

        Returns the checksum of the reference, "" where there is none.
        """
        if self.reference is not None:
            copy_weights(self.model, self.reference)
        self.optimizer = make_optimizer(self.model, self.policy)
        self.schedule_step = 0
        return self._checksums().get("reference", "")

    def save(self, uri: str, extra: Mapping[str, object]) -> dict[str, str]:
        """Write a checkpoint with its Hugging Face export; returns the checksum of each section of the state."""
        checksums = self._checksums()
        facts = checkpoint.Facts(
            architecture=architecture(self.model.config),
            sections=tuple(self._state()),
            version=self.version,
            schedule_step=self.schedule_step,
            checksums=checksums,
            num_ranks=self.gang.world,
            extra=extra,
        )
        checkpoint.save(uri, self._state(), facts, self.gang, lambda folder: self.publish(str(folder / "hf")))
        return checksums

    def load(self, uri: str) -> object:
        """Restore everything, check it against the recorded checksums, and return the saved `extra`.

        Raises:
            ConfigError: as `checkpoint.load`.
            TrainingError: what was read is not what was written.
        """
        state = self._state()
        facts = checkpoint.load(uri, state, architecture(self.model.config), self.gang)
        torch.set_rng_state(state["random"]["torch"])
        found = self._checksums()
        wrong = [name for name, value in found.items() if facts.checksums[name] != value]
        if wrong:
            raise TrainingError(f"checkpoint {uri}: {wrong} differ from what was saved; use an older checkpoint")
        self.schedule_step = facts.schedule_step
        self.version = facts.version if facts.version >= self.version else self.version + 1
        return facts.extra

    def _checksums(self) -> dict[str, str]:
        return {name: checksum(tensors, self.gang) for name, tensors in self._state().items()}

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor that a resumed run needs, by section; they share memory with the live ones."""
        parameters = dict(self.model.named_parameters())
        moments = {f"{n}.{k}": v for n, p in parameters.items() for k, v in self.optimizer.state[p].items()}
        state = {"model": {n: p.detach() for n, p in parameters.items()}, "optimizer": moments}
        if self.reference is not None:
            state["reference"] = {n: p.detach() for n, p in self.reference.named_parameters()}
        return state | {"random": checkpoint.random_state()}


def _no_push(*_: object) -> Mapping[str, str]:
    raise WorkerFailed("weight_sync.transport: this gang was started without a way to push weights")
