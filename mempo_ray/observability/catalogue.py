"""Every number that a run emits: name, unit, meaning, who emits it. `docs/metrics.md` is made from it.

A step's numbers are `group/name_unit`; the driver logs them to metrics.jsonl, the trackers and Ray. Live ones come from
inside the actors every few seconds, in groups of their own. In a Prometheus scrape a name has the prefix `ray_mempo_`.
A name may hold a placeholder: `{n}` a number, `{name}` one word, `{key}` anything.

`python -m mempo_ray.observability.catalogue > docs/metrics.md` writes the page again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mempo_ray.contracts import EndReason
from mempo_ray.observability.bottleneck import STAGES

Kind = Literal["gauge", "counter"]
Role = Literal["driver", "rollout", "agent_loop", "retrieval", "batch_executor", "policy", "reward"]

ENGINE_STATES = ("starting", "stale", "serving", "draining", "dead")
"""`engine/state` is an index into this."""

_PLACEHOLDERS = {"{n}": r"\d+", "{name}": r"[a-z0-9_]+", "{key}": r".+"}


@dataclass(frozen=True)
class Metric:
    """One entry. A counter only grows while its actor lives; `role` is the tag of who emits it."""

    name: str
    unit: str
    meaning: str
    kind: Kind = "gauge"
    role: Role = "driver"

    @property
    def scraped_as(self) -> str:
        """Its name in a scrape; placeholders stay."""
        return f"ray_{exported(self.name)}" + ("_total" if self.kind == "counter" else "")

    @property
    def has_placeholder(self) -> bool:
        return "{" in self.name

    @property
    def pattern(self) -> re.Pattern[str]:
        parts = re.split(r"(\{\w+\})", self.name)
        return re.compile("".join(_PLACEHOLDERS.get(part, re.escape(part)) for part in parts))


@dataclass(frozen=True)
class Section:
    """Entries of one group, with what is true of all of them."""

    title: str
    intro: str
    metrics: tuple[Metric, ...]


def exported(name: str) -> str:
    """The name that Ray gets. Braces stay, so that placeholders can be read.

    Example:
        >>> exported("rollout/output_tokens_per_s")
        'mempo_rollout_output_tokens_per_s'
    """
    return "mempo_" + re.sub("[^a-zA-Z0-9_{}]", "_", name)


def find(name: str) -> Metric | None:
    """The entry of an emitted name: that of just this name, else the first whose placeholders fit."""
    plain, patterns = _index()
    return plain.get(name) or next((metric for metric in patterns if metric.pattern.fullmatch(name)), None)


@cache
def _index() -> tuple[Mapping[str, Metric], tuple[Metric, ...]]:
    everything = [metric for section in SECTIONS for metric in section.metrics]
    plain = {metric.name: metric for metric in everything if not metric.has_placeholder}
    return plain, tuple(metric for metric in everything if metric.has_placeholder)


def _rows(group: str, text: str, kind: Kind = "gauge", role: Role = "driver") -> tuple[Metric, ...]:
    """Entries from lines of `name | unit | meaning`."""
    entries = []
    for line in text.strip().splitlines():
        name, unit, meaning = (cell.strip() for cell in line.split("|"))
        entries.append(Metric(f"{group}/{name}" if group else name, unit, meaning, kind, role))
    return tuple(entries)


_TIMED = {
    "step": "a whole step: rollout, update, sync",
    "rollout": "sampling and scoring, advantages included",
    "update": "the update, with the trajectory log beside it",
    "sync": "publishing the weights, and every engine holds and has proven them",
    "evaluation": "evaluation on held-out questions",
    "checkpoint": "writing the checkpoint, with its Hugging Face export",
    "recovery": "new ranks in the place of lost ones, from the newest checkpoint",
    "restore": "going on from a checkpoint, at the start",
    "cold_start": "the supervised steps before RL",
    "first_sync": "waiting for the engines, and their first weights",
}

SECTIONS = (
    Section(
        "Learning",
        "Rewards, the policy's update, held-out questions.",
        (
            *_rows(
                "", "step | step | the step that the other numbers belong to; in the metrics file a field of its own"
            ),
            *_rows(
                "reward",
                """
                outcome_mean | score | mean outcome reward of the scored trajectories
                outcome_std | score | its standard deviation
                kl_coef | – | KL coefficient of the next step's reward
                exposed_s | s | after the last episode and the last log-prob, waiting for outcomes alone
                extra/{key} | – | mean of a number or truth value that the scorer reported, over those that have it
                """,
            ),
            *_rows(
                "group",
                """
                num_groups | groups | tasks with at least one scored sibling
                kept_share | share | of the groups, those that are trained on (algorithm.group_filter)
                flat_outcome_share | share | of the groups, those whose outcomes are all equal: nothing to learn
                flat_memory_share | share | of the groups, those whose memory rewards are all equal
                """,
            ),
            *_rows(
                "policy",
                """
                loss | – | mean over optimiser steps
                grad_norm | – | before clipping, mean over optimiser steps
                lr | – | learning rate of the last optimiser step
                entropy | nats | mean over trained tokens
                kl_ref | nats | KL to the reference, mean over trained tokens
                kl_old | nats | approximate KL to the policy that sampled, mean over trained tokens
                clip_share | share | of the trained tokens, those whose ratio was clipped
                dual_clip_share | share | of the trained tokens, those that the dual clip caught
                logprob_gap_mean | nats | mean distance between the engine's and the policy's log-probs of a token
                logprob_gap_max | nats | the largest of them
                num_tokens | tokens | trained
                num_optimizer_steps | steps | applied
                num_nonfinite_skipped | steps | optimiser steps left out because a gradient was not finite
                num_flat_skipped | steps | optimiser steps left out because all advantages were 0
                seconds | s | of the update, on rank 0
                peak_memory_gb | GiB | of rank 0: device memory on CUDA, else resident memory
                num_restarts | restarts | of lost ranks, in this process of the run
                """,
            ),
            *_rows(
                "eval",
                """
                em | share | exact match on held-out questions
                f1 | score | token F1 on held-out questions
                format_valid_share | share | of the episodes, those whose format is valid
                total_tokens_mean | tokens | TT: tokens that the model processed for a question, over all turns
                peak_tokens_mean | tokens | PT: the largest prompt + output of a turn
                num_questions | questions | evaluated
                num_excluded | questions | left out because infrastructure broke them
                reward_mean | score | mean outcome reward
                {name} | – | `rollout/{name}` of these episodes; with the prefix `retrieval_`, `retrieval/{name}`
                """,
            ),
        ),
    ),
    Section(
        "Memory",
        "The memory reward is P_mem − P_full (or − P_base): how much likelier the memory makes the answer.",
        (
            *_rows(
                "memory",
                """
                reward | probability | mean memory reward: the gap P_mem − P_full
                p_mem | probability | P(answer given question and memory), geometric mean over tokens, mean over samples
                p_base | probability | P_full: the same given the whole history (memory_reward.baseline)
                num_samples | turns | that have a memory reward
                num_gated | turns | whose memory advantage was gated to 0
                num_dropped | turns | without a sample: no memory, or no room
                flat_pool_share | share | of the pools, those whose rewards are all equal
                version_gap | versions | staleness: largest distance between the weights of a memory's scorer and writer
                advantage_turn_{n} | – | mean memory advantage of the n-th turn
                p_mem_turn_{n} | probability | P_mem of the n-th turn
                p_base_turn_{n} | probability | P_full of the n-th turn
                reward_variance_turn_{n} | – | variance of the memory reward of the n-th turn
                """,
            ),
            *_rows(
                "",
                """
                p_mem_ratio | ratio | at the start: P(answer given the oracle's memory) / P(the same, its fact replaced)
                p_full_ratio | ratio | at the start: P(answer given the oracle's history) / P(answer given the question)
                p_mem_oracle | probability | at the start: P(answer given the oracle's memory)
                p_full_oracle | probability | at the start: P(answer given the oracle's history)
                num_probe_trajectories | trajectories | that these four are means over
                """,
            ),
        ),
    ),
    Section(
        "Rollout",
        "Episodes of a step, and the pool of engines. Counts are since the step before.",
        (
            *_rows(
                "rollout",
                """
                num_trajectories | trajectories | sampled
                excluded_share | share | of the trajectories, those that do not count: broken, or without a score
                unscored_share | share | of the trajectories, those without a score
                num_rescores | calls | outcomes asked for again because nobody had judged
                payload_bytes | bytes | of the trajectories' payloads, in the object store until the step ends
                num_reencoded | turns | whose ids had to be encoded again
                format_valid_share | share | of the scored trajectories, those whose format is valid
                turns_mean | turns | of a scored trajectory
                output_tokens | tokens | sampled, of scored trajectories
                output_tokens_mean | tokens | sampled, of a scored trajectory
                output_tokens_per_s | tokens/s | output_tokens / time/generation_s
                row_tokens | tokens | of all training rows
                memory_turn_share | share | of the turns, those that write a memory
                drift_turns | turns | whose logged text would be encoded to other ids
                num_unlogged | trajectories | missing in the log, because their payloads were lost with their node
                episodes | episodes | ended
                episodes_resampled | episodes | sampled more than once because infrastructure broke them
                episodes_excluded | episodes | still broken after agent.max_resamples
                episodes_in_flight | episodes | now
                turns_asked_again | turns | that an engine failed and another was asked for
                num_reprefills | turns | whose episode had to leave its engine, so that another filled its cache anew
                affinity_hit_rate | share | of the turns of a group that had an engine, those that went to the same one
                turn_wait_s | s | that episodes waited for turns, summed over episodes
                tool_wait_s | s | that episodes waited for tools, summed over episodes
                tool_tries_failed | tries | of tool calls; each was tried again, or failed its episode
                tool_reconnects | connections | to MCP servers that had died or hung
                searches | queries | asked by the agent workers
                searches_repeated | queries | of them, answered in the worker
                searches_failed | searches | at a replica or server; each was asked again, or failed its caller
                engine_restarts | restarts | of engines
                recovery_s | s | from the death of an engine until its successor served, summed
                worker_restarts | restarts | of agent workers
                engines_joined | engines | after the start: grown, or in the place of one that left
                engines_left | engines | drained: shrunk, or their node was about to go
                joins_failed | engines | asked for in vain
                num_serving | engines | that serve now
                num_joining | engines | that start, or wait for weights, now
                waiting_share | share | of the last cycle, waiting for generation
                """,
            ),
            *(
                Metric(
                    f"rollout/end_{reason.value}_share",
                    "share",
                    f"of the scored trajectories, those that ended: {reason.value}",
                )
                for reason in EndReason
            ),
        ),
    ),
    Section(
        "Log-probs and weights",
        "The batch executor in front of the policy's ranks, the forest of shared prefixes, the weight sync.",
        (
            *_rows(
                "executor",
                """
                num_answered | requests | answered
                num_failed | requests | failed
                num_micro_batches | micro-batches | run
                tokens | tokens | computed, padding included
                busy_s | s | in micro-batches and commands
                score_s | s | in micro-batches
                num_queued | requests | waiting now
                queued_tokens | tokens | waiting now
                wait_p50_s | s | in the queue, median
                wait_p95_s | s | in the queue, 95th percentile
                wait_p99_s | s | in the queue, 99th percentile
                batch_fill | share | tokens asked for / token budget of the micro-batches
                merged_share | share | of the tokens asked for, computed together with those of another request
                padding_share | share | of the tokens computed, padding
                items_per_s | requests/s | of score_s
                tokens_per_s | tokens/s | of score_s
                """,
            ),
            *_rows(
                "scoring",
                """
                busy_s | s | in which log-probs were computed
                exposed_s | s | from the last trajectory's end to the last log-prob: what scoring adds to the step
                hidden_share | share | of busy_s, what lay beside generation
                num_passes | passes | forward passes of the ranks for log-probs
                num_tokens | tokens | that went through them
                num_plain_tokens | tokens | that would have, one row at a time
                num_trunks | trunks | histories; more than one a trajectory did not continue each other
                engine_busy_s | s | with at least one log-prob request at an engine (memory_reward.scorer_engine=vllm)
                num_engine_failures | requests | that an engine failed and another was asked for
                """,
            ),
            *_rows(
                "sync",
                """
                seconds | s | until enough engines held and had proven the weights
                max_gap | nats | largest distance between the policy's and an engine's log-probs of the proof
                num_engines | engines | that serve this version
                version | version | of the weights that were synced
                """,
            ),
        ),
    ),
    Section(
        "Retrieval",
        "Over all replicas, since the step before.",
        _rows(
            "retrieval",
            """
            queries | queries | asked
            queries_per_s | queries/s | since the step before
            hit_rate | share | of the queries: from memory, joined one in flight, or from the disk cache
            batch_size | queries | of a batch, mean
            queue_wait_s | s | in the queue, mean over batched queries
            encode_share | share | of busy_s, encoding
            busy_s | s | encoding or searching, summed over replicas
            latency_p50_s | s | of the last 4,096 searches, median, of the slowest replica
            latency_p99_s | s | of the last 4,096 searches, 99th percentile, of the slowest replica
            num_replicas | replicas | that answered
            num_serving | replicas | that are searched now
            num_joining | replicas | that start, for the first time or again, now
            replicas_joined | replicas | after the start: grown, or in the place of one that left
            replicas_left | replicas | drained: shrunk, or their node was about to go
            joins_failed | replicas | that did not start, or did not come back
            rejected | queries | empty or over-long
            failed | searches | encoder or index failed
            timeouts | searches | reached their deadline
            overloaded | searches | refused: the queue was full
            disk_failures | failures | of the disk cache; it is out of use from then on
            batches_failed | batches | that encoder or index failed; each was run again, a query at a time
            """,
        ),
    ),
    Section(
        "Time and memory",
        "Wall seconds and the largest memory of the driver's process tree (PSS), by stage. Stages nest.",
        (
            *(Metric(f"time/{name}_s", "s", meaning) for name, meaning in _TIMED.items()),
            *_rows("time", "generation_s | s | until the last episode of the step ended"),
            *(Metric(f"ram/{name}_gb", "GB", meaning) for name, meaning in _TIMED.items()),
        ),
    ),
    Section(
        "Bottleneck",
        "Shares of a step's wall time; they add up to 1. The largest is what the display calls the bottleneck "
        "(`observability/bottleneck.py`).",
        tuple(Metric(f"bottleneck/{stage}_share", "share", meaning) for stage, meaning in STAGES.items()),
    ),
    Section(
        "Live: rollout engines",
        "From each RolloutActor. State: "
        + ", ".join(f"{code} {state}" for code, state in enumerate(ENGINE_STATES))
        + ".",
        (
            *_rows(
                "engine",
                """
                num_in_flight | requests | turns and scores at the engine
                in_flight_tokens | tokens | of them: prompt and the most that may come
                num_queued | requests | of them, waiting inside the engine
                kv_use | share | of the KV cache that is in use
                weight_version | version | of its proven weights; −1: none
                state | code | see above
                """,
                role="rollout",
            ),
            *_rows(
                "engine",
                """
                output_tokens | tokens | sampled
                prompt_tokens | tokens | of prompts that were looked up in the prefix cache
                prefix_hit_tokens | tokens | of them, found there
                """,
                "counter",
                "rollout",
            ),
        ),
    ),
    Section(
        "Live: agent workers",
        "From each AgentLoopWorker.",
        (
            *_rows(
                "agent",
                """
                episodes_in_flight | episodes | running
                turns_waiting | turns | that no engine has, because none serves
                """,
                role="agent_loop",
            ),
            *_rows(
                "agent",
                """
                episodes | episodes | ended
                turns_asked_again | turns | that an engine failed and another was asked for
                num_reprefills | turns | whose episode had to leave its engine
                tool_tries_failed | tries | of tool calls
                """,
                "counter",
                "agent_loop",
            ),
        ),
    ),
    Section(
        "Live: retrieval replicas",
        "From each RetrievalActor.",
        (
            *_rows(
                "search",
                """
                num_queued | queries | waiting for a batch
                latency_p50_s | s | of the last 4,096 searches, median
                latency_p99_s | s | of the last 4,096 searches, 99th percentile
                """,
                role="retrieval",
            ),
            *_rows(
                "search",
                """
                queries | queries | asked; its rate is the QPS
                hits | queries | from memory, joined one in flight, or from the disk cache
                busy_s | s | encoding or searching
                failed | searches | failed, refused, or past their deadline
                """,
                "counter",
                "retrieval",
            ),
        ),
    ),
    Section(
        "Live: batch executor",
        "From the BatchExecutor, the one caller of the ranks.",
        _rows(
            "queue",
            """
            num_queued | requests | waiting
            queued_tokens | tokens | waiting
            oldest_wait_s | s | since the oldest request without an answer came
            """,
            role="batch_executor",
        )
        + _rows(
            "queue",
            """
            num_answered | requests | answered or failed
            tokens | tokens | computed, padding included
            busy_s | s | in micro-batches and commands
            """,
            "counter",
            "batch_executor",
        ),
    ),
    Section(
        "Live: policy ranks",
        "From each PolicyWorker, after each command; `replica` is its rank.",
        _rows(
            "rank",
            """
            version | version | of its weights
            command_s | s | of the last command
            memory_gb | GiB | peak: device memory on CUDA, else resident memory
            """,
            role="policy",
        )
        + _rows("rank", "busy_s | s | in commands", "counter", "policy"),
    ),
    Section(
        "Live: reward workers",
        "From each RewardManagerWorker.",
        _rows("scorer", "num_in_flight | trajectories | being scored", role="reward")
        + _rows(
            "scorer",
            """
            num_scored | trajectories | that got a score
            num_unscored | trajectories | that got none
            """,
            "counter",
            "reward",
        ),
    ),
)


def live(role: Role) -> tuple[Metric, ...]:
    """What the actors of a role emit by themselves."""
    return tuple(metric for metric in _index()[0].values() if metric.role == role)


def markdown() -> str:
    """The page `docs/metrics.md`."""
    lines = [_HEAD]
    for section in SECTIONS:
        lines += [
            f"## {section.title}",
            "",
            section.intro,
            "",
            "| name | unit | in a scrape | meaning |",
            "|---|---|---|---|",
        ]
        lines += [f"| `{m.name}` | {m.unit} | `{m.scraped_as}` | {m.meaning} |" for m in section.metrics]
        lines.append("")
    return "\n".join(lines)


_HEAD = """# Metrics

Made from `mempo_ray/observability/catalogue.py` by `python -m mempo_ray.observability.catalogue`; tests hold the page
and what runs emit against it.

A step's numbers are one line of `metrics.jsonl` in the run folder, and go to the trackers (`trackers`) and to Ray. Live
numbers come from inside the actors every few seconds, and go to Ray only. Ray exports both to Prometheus with the tags
`run` (the run folder's name), `role` and `replica`; the driver's role is `driver`. A counter grows while its actor
lives: take its `rate`. A name that is missing was not measured in that step.

```bash
mempo-ray dashboard                     # how to scrape them, and to see them in Grafana and on Ray's dashboard
mempo-ray dashboard --out monitoring    # the same as files: prometheus.yml, mempo.json, README.md
```

The Grafana dashboard `configs/grafana/mempo.json` has six rows: learning, memory, throughput, bottleneck, retrieval,
health. After each step that took seconds the run's log says which stage took most of it, and what to change:

> bound by: generation took 60% of the step (rollout engines): raise rollout.replicas
"""


if __name__ == "__main__":
    print(markdown(), end="")
