"""The optimiser steps: policy update (algorithm.md §5) and supervised.

    rows ─ micro-batches ─▶ loss_k · w_k ─ backward (accumulates shards) ─▶ clip ─ AdamW, once per mini-batch

w_k holds the whole aggregation with global denominators, so gradients simply add up over micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mempo_ray.algo.correction import correction_weight
from mempo_ray.algo.kl import kl_estimate
from mempo_ray.algo.policy_loss import Surrogate, Tokens, entropy, token_weights
from mempo_ray.algo.registry import POLICY_LOSSES
from mempo_ray.config.schema import Policy
from mempo_ray.training.forest import ForestPlan, plan_forest
from mempo_ray.training.logprobs import MicroBatch, gather_logprobs, micro_batches, row_logprobs, target_logits
from mempo_ray.training.rows import PolicyRow, Row
from mempo_ray.training.settings import RankSettings
from mempo_ray.training.sharding import Gang


def learning_rate(step: int, policy: Policy, total: int) -> float:
    """Rate of optimiser step 0 … total−1: linear warm-up over `warmup_steps`, then constant or a cosine to 0."""
    if step < policy.warmup_steps:
        return policy.lr * (step + 1) / policy.warmup_steps
    if policy.schedule == "constant":
        return policy.lr
    share = (step - policy.warmup_steps) / max(total - policy.warmup_steps, 1)
    return policy.lr * 0.5 * (1 + math.cos(math.pi * min(share, 1)))


def make_optimizer(model: nn.Module, policy: Policy) -> torch.optim.AdamW:
    """AdamW whose state exists from the start, so that memory is taken once and a checkpoint always has it."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=policy.lr, betas=policy.betas, eps=policy.eps, weight_decay=policy.weight_decay
    )
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


@dataclass(frozen=True)
class Applied:
    """What became of one optimiser step. `grad_norm` is global, before clipping."""

    grad_norm: float
    is_applied: bool


def apply_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, max_norm: float) -> Applied:
    """Clip by the global norm and step; gradients that are not finite change nothing. Collective."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    is_finite = bool(torch.isfinite(norm))
    if is_finite:
        clip_grads_with_norm_(model.parameters(), max_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad()
    return Applied(norm.item(), is_finite)


def supervised_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Row],
    *,
    lr: float,
    num_target_tokens: int,
    policy: Policy,
    gang: Gang,
) -> tuple[Applied, float]:
    """One step on loss = −Σ log π(target) / num_target_tokens (over all ranks). Returns the global loss too."""
    total = 0.0
    plan = plan_forest(rows, policy.micro_batch_tokens, share=policy.share_prefixes)
    for batch in micro_batches(plan, gang):
        logp = gather_logprobs(target_logits(model, batch, policy.autocast), batch)
        loss = -logp.sum() / num_target_tokens * bool(batch.rows)
        (loss * gang.world).backward()  # FSDP averages gradients over ranks
        total += loss.item()
    total = gang.sum(torch.tensor([total], dtype=torch.float64)).item()
    return apply_gradients(model, optimizer, lr, policy.max_grad_norm), total


class PolicyUpdate:
    """One TrainCommand: `epochs` passes over `mini_batches` optimiser steps on rows whose order is given.

    Old log-probs (§5): with a single optimiser step they are the detached log π of the same forward; otherwise
    they are computed once, before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None,
        optimizer: torch.optim.Optimizer,
        settings: RankSettings,
        gang: Gang,
    ) -> None:
        self.model, self.reference, self.optimizer, self.gang = model, reference, optimizer, gang
        self.policy, self.algorithm = settings.policy, settings.algorithm
        self.num_optimizer_steps = settings.num_optimizer_steps
        self.policy_loss = POLICY_LOSSES.get(self.algorithm.policy_loss)
        self.tally = _Tally()

    def run(
        self, mini_batches: Sequence[Sequence[PolicyRow]], num_trajectories: Sequence[int], first_step: int
    ) -> dict[str, float]:
        """Train on this rank's rows by mini-batch. `first_step` is the schedule's step. Collective; returns metrics."""
        old_logprobs: list[list[Tensor] | None] = [None] * len(mini_batches)
        if len(mini_batches) > 1 or self.algorithm.epochs > 1:
            old_logprobs = [self._logprobs(self.model, rows) for rows in mini_batches]
        step = first_step
        for _ in range(self.algorithm.epochs):
            for rows, old, num in zip(mini_batches, old_logprobs, num_trajectories, strict=True):
                self._mini_batch(rows, old, num, learning_rate(step, self.policy, self.num_optimizer_steps))
                step += 1
        return self.tally.metrics(self.gang)

    def _logprobs(self, model: nn.Module, rows: Sequence[PolicyRow]) -> list[Tensor]:
        return row_logprobs(model, self._plan(rows), self.policy.autocast, self.gang)

    def _plan(self, rows: Sequence[PolicyRow]) -> ForestPlan:
        return plan_forest([r.row for r in rows], self.policy.micro_batch_tokens, share=self.policy.share_prefixes)

    def _mini_batch(
        self, rows: Sequence[PolicyRow], old_logprobs: list[Tensor] | None, num_trajectories: int, lr: float
    ) -> None:
        own = [sum(len(r.row.targets_K) for r in rows), sum(int(np.count_nonzero(r.advantages_K)) for r in rows)]
        num_tokens, num_advantages = self.gang.sum(torch.tensor(own)).tolist()
        has_other_terms = self.algorithm.kl_coef > 0 or self.algorithm.entropy_bonus > 0
        if num_tokens == 0 or (num_advantages == 0 and not has_other_terms):
            self.tally.num_flat += 1
            return
        for batch in micro_batches(self._plan(rows), self.gang):
            chosen = [rows[i] for i in batch.rows]
            old = None if old_logprobs is None else [old_logprobs[i] for i in batch.rows]
            loss = self._loss(batch, chosen, old, num_trajectories, num_tokens)
            (loss * self.gang.world).backward()  # FSDP averages gradients over ranks
        self.tally.add_step(apply_gradients(self.model, self.optimizer, lr, self.policy.max_grad_norm), lr)

    def _loss(
        self,
        batch: MicroBatch,
        rows: Sequence[PolicyRow],
        old_logprobs: list[Tensor] | None,
        num_trajectories: int,
        num_tokens: int,
    ) -> Tensor:
        """Σ_k w_k · (c_k · surrogate_k + β · kl_k − bonus · entropy_k) over the targets of this micro-batch."""
        a, device = self.algorithm, batch.ids.device
        logits = target_logits(self.model, batch, self.policy.autocast)
        logp = gather_logprobs(logits, batch)
        ref_logp = None
        if a.kl_coef > 0 and self.reference is not None:
            with torch.no_grad():
                ref_logp = gather_logprobs(target_logits(self.reference, batch, self.policy.autocast), batch)
        if not batch.rows:
            return logp.sum() * 0

        old = logp.detach() if old_logprobs is None else torch.cat(old_logprobs).to(device)
        sampler = torch.from_numpy(np.concatenate([r.sampler_logprobs_K for r in rows])).to(device)
        advantages = torch.from_numpy(np.concatenate([r.advantages_K for r in rows])).to(device)
        lengths = [len(r.row.targets_K) for r in rows]
        row_of = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)).to(device)
        part = self.policy_loss(Tokens(logp, old, advantages, row_of), a)
        token_loss = part.loss
        if a.sampler_correction:
            token_loss = token_loss * correction_weight(old, sampler, cap=a.correction_cap)
        kl = None if ref_logp is None else kl_estimate(logp, ref_logp, estimator=a.kl_estimator)
        if kl is not None:
            token_loss = token_loss + a.kl_coef * kl
        with torch.set_grad_enabled(a.entropy_bonus > 0):
            entropies = entropy(logits)[batch.slots]
        token_loss = token_loss - a.entropy_bonus * entropies

        owners = np.repeat([r.trajectory_tokens for r in rows], lengths)
        weights = token_weights(
            torch.ones_like(logp),
            torch.from_numpy(owners).to(device),
            aggregation=a.aggregation,
            num_trajectories=num_trajectories,
            num_tokens=num_tokens,
            norm_length=a.norm_length,
        )
        loss = (weights * token_loss).sum()
        # `old` is of the version before the first step, which sampled: the gap is that of the two engines.
        self.tally.add_batch(loss, part, entropies, kl, logp - old, (old - sampler).abs())
        return loss


class _Tally:
    """Sums of one update on this rank; `metrics` reduces them over the gang. Means are over trained tokens."""

    SUMS = ("loss", "num_tokens", "clipped", "dual_clipped", "entropy", "kl", "approx_kl", "gap")

    def __init__(self) -> None:
        self.sums = dict.fromkeys(self.SUMS, 0.0)
        self.gap_max = 0.0
        self.grad_norms: list[float] = []
        self.lr = 0.0
        self.num_applied = self.num_nonfinite = self.num_flat = 0

    def add_batch(
        self, loss: Tensor, part: Surrogate, entropies: Tensor, kl: Tensor | None, log_ratio: Tensor, gap: Tensor
    ) -> None:
        new = {
            "loss": loss,
            "num_tokens": torch.tensor(float(len(log_ratio))),
            "clipped": part.is_clipped.sum(),
            "dual_clipped": part.is_dual_clipped.sum(),
            "entropy": entropies.sum(),
            "kl": torch.tensor(0.0) if kl is None else kl.sum(),
            "approx_kl": -log_ratio.sum(),
            "gap": gap.sum(),
        }
        for name, value in new.items():
            self.sums[name] += float(value.detach())
        self.gap_max = max(self.gap_max, gap.max().item())

    def add_step(self, applied: Applied, lr: float) -> None:
        if applied.is_applied:
            self.grad_norms.append(applied.grad_norm)
        self.lr = lr
        self.num_applied += applied.is_applied
        self.num_nonfinite += not applied.is_applied

    def metrics(self, gang: Gang) -> dict[str, float]:
        totals = gang.sum(torch.tensor([self.sums[n] for n in self.SUMS], dtype=torch.float64)).tolist()
        s = dict(zip(self.SUMS, totals, strict=True))
        tokens, steps = max(s["num_tokens"], 1), max(self.num_applied, 1)
        return {
            "policy/loss": s["loss"] / steps,
            "policy/grad_norm": sum(self.grad_norms) / steps,
            "policy/lr": self.lr,
            "policy/entropy": s["entropy"] / tokens,
            "policy/kl_ref": s["kl"] / tokens,
            "policy/kl_old": s["approx_kl"] / tokens,
            "policy/clip_share": s["clipped"] / tokens,
            "policy/dual_clip_share": s["dual_clipped"] / tokens,
            "policy/logprob_gap_mean": s["gap"] / tokens,
            "policy/logprob_gap_max": gang.max(self.gap_max),
            "policy/num_tokens": s["num_tokens"],
            "policy/num_optimizer_steps": self.num_applied,
            "policy/num_nonfinite_skipped": self.num_nonfinite,
            "policy/num_flat_skipped": self.num_flat,
        }
