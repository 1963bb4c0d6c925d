"""What one FSDP rank is given of the configuration. Imports no torch, so the driver can make it."""

from __future__ import annotations

from dataclasses import dataclass

from mempo_ray.config.schema import Algorithm, Config, Policy


@dataclass(frozen=True)
class RankSettings:
    """`temperature` is the sampler's: every log π of algorithm.md §5 is of logits / temperature."""

    policy: Policy
    algorithm: Algorithm
    temperature: float
    score_tokens: int  # budget of one forward without gradient
    num_optimizer_steps: int  # of the whole run: the length of the learning-rate schedule
    needs_reference: bool
    seed: int
    collective_timeout_s: float  # deadline of any wait of one rank for another
    plugins: tuple[str, ...]
    shares_gpu: bool  # with an engine, in turns

    @classmethod
    def from_config(cls, config: Config) -> RankSettings:
        return cls(
            policy=config.policy,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            score_tokens=config.batch_executor.micro_batch_tokens,
            num_optimizer_steps=config.run.steps * config.algorithm.mini_batches * config.algorithm.epochs,
            needs_reference=config.needs_reference,
            seed=config.run.seed,
            collective_timeout_s=config.batch_executor.command_timeout_s,
            plugins=config.plugins,
            shares_gpu=config.placement.layout == "colocated",
        )
