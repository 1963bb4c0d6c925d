"""What a run holds while it runs, and the stages around the driver's loop.

stage      consumes                       produces                          on failure
start      checkpoint, or tasks           policy, engines at its version    typed, before the first step
evaluate   held-out tasks                 EM, F1, TT, PT by question        too many excluded: the run ends
log        payloads, scores, advantages   trajectories/*.parquet, metrics   a lost payload: all others are logged
save       policy, positions, results     checkpoints/step_…                the run ends; the last complete stays
finish     all of the above               summary.json, learning_curve.png
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import psutil

from mempo_ray.actors.adapters import RayPolicy
from mempo_ray.actors.fleet import Fleet
from mempo_ray.agent.group import siblings
from mempo_ray.agent.memory import swapped_memories
from mempo_ray.agent.prompt import Renderer
from mempo_ray.cold_start import probe_contexts, run_cold_start
from mempo_ray.config.schema import ColdStart, Config
from mempo_ray.contracts import EpisodeRequest, Task, TrajectoryBatch
from mempo_ray.data.oracle import oracle_trajectories
from mempo_ray.data.tasks import TaskSource
from mempo_ray.errors import DeadlineExceeded, GangLost, GivenUp, PayloadLost, TrainingError
from mempo_ray.evaluation.metrics import Evaluated, aggregate, evaluated, paired_interval
from mempo_ray.evaluation.probes import probe_ratios
from mempo_ray.evaluation.transcript import transcript
from mempo_ray.experience import (
    Assembled,
    Collected,
    Sample,
    adapted_kl_coef,
    assemble,
    check_excluded,
    collect,
    scoring_metrics,
    survivors_of,
)
from mempo_ray.observability.bottleneck import find_bottleneck
from mempo_ray.observability.metrics import Fanout
from mempo_ray.observability.mirror import Mirror
from mempo_ray.observability.progress import Display
from mempo_ray.observability.report import draw_learning_curve, summary_table
from mempo_ray.observability.resources import MemoryMonitor
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.observability.timing import StageTimer
from mempo_ray.trajectory_log import drifted_turns, log_tables, read_memories

Logged = tuple[Sample, TrajectoryBatch]
"""A trajectory that is in the log, and its payload."""


@dataclass
class Progress:
    """The driver's own state; everything here is saved in a checkpoint and restored from it."""

    step: int = 0
    kl_coef: float = 0.0
    best_em: float = -1.0
    best_step: int = -1
    seconds: float = 0.0  # of earlier processes of this run
    drift_turns: int = 0
    max_logprob_gap: float = 0.0
    scoring_busy_s: float = 0.0
    scoring_exposed_s: float = 0.0
    num_samples_shown: int = 0
    cold_start: dict = field(default_factory=dict)  # task_id → [em, format_valid] of the evaluation before RL
    probes: dict = field(default_factory=dict)


def first_difference(requests: Sequence[list], recorded: Sequence[list]) -> str:
    """Where the episodes of a step ([task id, sibling, seed] each) are not the recorded ones; '' = nowhere."""
    pairs = ((new, old) for new, old in itertools.zip_longest(requests, recorded) if new != old)
    if (pair := next(pairs, None)) is None:
        return ""
    new, old = pair
    return (
        f"{len(requests)} episodes, {len(recorded)} when it was saved; "
        f"the first to differ: [task, sibling, seed] = {new}, saved {old}"
    )


@dataclass
class Session:
    """One run in one process."""

    config: Config
    folder: RunFolder
    mirror: Mirror | None  # of a run.dir that is a URI
    fleet: Fleet
    renderer: Renderer
    source: TaskSource
    train_tasks: tuple[Task, ...]
    held_out: tuple[Task, ...]
    display: Display
    metrics: Fanout
    memory: MemoryMonitor
    timer: StageTimer = field(default_factory=StageTimer)
    progress: Progress = field(default_factory=Progress)
    version: int = 0
    newest_checkpoint: str | None = None
    num_gang_restarts: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _give_up_at: float | None = None  # of the loop's clock
    _limit: asyncio.Timeout | None = None  # around what may be given up, while it lasts
    _before_step: dict = field(default_factory=dict)  # state of `source` after the last whole step

    @property
    def policy(self) -> RayPolicy:
        assert self.fleet.policy is not None  # a session trains
        return self.fleet.policy

    # -- before the loop --------------------------------------------------------------------------------

    async def start(self, checkpoint: str | None) -> None:
        """Continue from a checkpoint, or run the cold start; where RL has not begun yet, the first evaluation."""
        if checkpoint is not None:
            with self.timer.stage("restore"):
                values = await self._restore(checkpoint)
            if self.progress.step > 0:
                return
        else:
            await self.cold_start()
            await self.save(0, {})
            self.display.stage("waiting for the engines")
            with self.timer.stage("first_sync"):
                values = await self.sync()
        if self.config.eval.probe_ratios:
            self.progress.probes = await self._probe_ratios()
        if self.config.eval.before_train:
            results, more = await self.evaluate("step_0000")
            self.progress.cold_start = {r.task_id: [r.em, float(r.format_valid)] for r in results}
            self._note_best(0, more)
            values |= more
        self.log_metrics(0, {**values, **self.progress.probes, **await self.policy.stats()})

    async def cold_start(self) -> None:
        """Supervised steps, if the configuration wants them; the weights after them are π_ref and where RL starts."""
        self.progress.kl_coef = self.config.algorithm.kl_reward_coef
        if self.config.cold_start is not None:
            with self.timer.stage("cold_start"):
                await self._supervise(self.config.cold_start)
        await self.policy.freeze_reference()

    async def _supervise(self, settings: ColdStart) -> None:
        report = await run_cold_start(
            self.train_tasks,
            settings,
            self.config,
            self.renderer,
            self.fleet.search,
            self.policy.fit,
            self.display.stage,
            self.display.advance,
        )
        self.folder.write_json("cold_start.json", asdict(report))
        self.display.say(
            f"cold start: {report.num_kept} oracle trajectories kept of {report.num_tasks} tasks, "
            f"{report.num_rows} rows, {report.num_steps} steps, loss {report.loss:.3f}"
        )

    async def _probe_ratios(self) -> dict[str, float]:
        """p_mem_ratio and p_full_ratio on held-out oracle trajectories (evaluation/probes.py)."""
        self.display.stage("probing P_mem and P_full")
        found = await oracle_trajectories(self.held_out, self.fleet.search, self.config.agent.top_k)
        contexts = probe_contexts(found, self.renderer, self.config)
        return await probe_ratios(contexts, self.policy, self.config.batch_executor.request_timeout_s)

    @asynccontextmanager
    async def deadline(self, step: int) -> AsyncGenerator[None]:
        """Times a step. Raises DeadlineExceeded after `run.step_timeout_s`."""
        timeout_s = self.config.run.step_timeout_s
        try:
            with self.timer.stage("step"):
                async with asyncio.timeout(timeout_s):
                    yield
        except TimeoutError:
            raise DeadlineExceeded(f"step {step} took longer than run.step_timeout_s={timeout_s:g} s") from None

    # -- stopping ---------------------------------------------------------------------------------------

    def ask_to_stop(self, within_s: float | None) -> None:
        """Stop after the step; with a limit, give up what may be given up when half of it has gone.

        The other half is for the checkpoint and for closing.
        """
        self.stop.set()
        if within_s is not None:
            self._give_up_at = asyncio.get_running_loop().time() + within_s / 2
            if self._limit is not None:
                self._limit.reschedule(self._give_up_at)

    @asynccontextmanager
    async def may_be_given_up(self, where: str) -> AsyncGenerator[None]:
        """Around work that can be done again. Raises GivenUp where the time to stop ends first; `where` is for it."""
        limit = asyncio.timeout_at(self._give_up_at)
        try:
            async with limit as self._limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise GivenUp(f"stopped {where}; go on with run.resume=auto") from None
        finally:
            self._limit = None

    async def save_last_step(self) -> None:
        """A checkpoint of the last whole step, unless there is one. What was sampled since is sampled again."""
        step = self.progress.step
        if self.newest_checkpoint != self._checkpoint(step):
            self.source.restore(self._before_step)
            await self.save(step, {})

    # -- one step ---------------------------------------------------------------------------------------

    async def sample_and_score(self, step: int) -> tuple[Assembled, Collected]:
        """Episodes, scores and advantages of one step; with a group filter, rounds of it."""
        self._before_step = self.source.state()
        rounds: list[Collected] = []
        num_tasks, filter_round = self.config.data.tasks_per_step, 0
        while True:
            seen = {sample.key[0] for part in rounds for sample in part.samples}  # a round may cross into a new epoch
            requests = self.requests([task for task in self.source.next(num_tasks) if task.task_id not in seen])
            self.display.stage(f"step {step}: sampling and scoring", len(requests))
            ports = (self.fleet.rollouts, self.fleet.rewards, self.policy)
            scorer = self.fleet.engine_scorer
            rounds.append(
                await collect(requests, *ports, self.config, self.version, self.display.advance, scorer=scorer)
            )
            collected = Collected.of(rounds)
            try:
                assembled = assemble(
                    collected.samples,
                    self.config,
                    step=step,
                    version=self.version,
                    kl_coef=self.progress.kl_coef,
                    filter_round=filter_round,
                )
            except TrainingError:  # the run ends: what it ends with is in the log
                await self.log_trajectories(f"step_{step:04d}", collected.samples, None)
                raise
            num_tasks, filter_round = assembled.num_missing_tasks, filter_round + 1
            if num_tasks == 0:
                self.progress.kl_coef = adapted_kl_coef(collected.samples, self.config, self.progress.kl_coef)
                return assembled, collected

    async def train(self, assembled: Assembled, collected: Collected) -> dict[str, float]:
        """The update, and beside it the trajectory log."""
        step = assembled.plan.step
        self.display.stage(f"step {step}: update")
        report, logged = await asyncio.gather(
            self.policy.train(assembled.plan),
            self.log_trajectories(f"step_{step:04d}", collected.samples, assembled),
        )
        unlogged = self._unlogged(collected.samples, logged)
        drift = sum(drifted_turns(batch, self.renderer, self.config.agent) for _, batch in logged)
        self._show_samples(logged)
        self.version = report.version
        self.progress.drift_turns += drift
        self.progress.max_logprob_gap = max(self.progress.max_logprob_gap, report.metrics["policy/logprob_gap_max"])
        drifted = {"rollout/drift_turns": float(drift), "rollout/num_unlogged": float(len(unlogged))}
        return {**report.metrics, **drifted}

    def _show_samples(self, logged: Sequence[Logged]) -> None:
        """Print and log the first trajectories of a run, one a task: does the reward see what you think it sees?"""
        wanted = self.config.reward.log_samples - self.progress.num_samples_shown
        firsts = {sample.key[0]: (sample, batch) for sample, batch in reversed(logged)}
        for sample, batch in list(reversed(firsts.values()))[: max(0, wanted)]:
            (trajectory,) = batch.trajectories()
            text = transcript(trajectory, sample.score, sample.extra, self.renderer.tokenizer.decode)
            self.display.say(text + "\n")
            self.folder.append_text("samples.txt", text + "\n\n")
            self.progress.num_samples_shown += 1

    async def sync(self) -> dict[str, float]:
        """Publish the policy once; every engine holds and proves it."""
        manifest = await self.policy.publish()
        report = await self.fleet.rollouts.sync(manifest)
        self.version = manifest.version
        return {
            "sync/seconds": report.seconds,
            "sync/max_gap": report.max_gap,
            "sync/num_engines": float(report.num_engines),
            "sync/version": float(report.version),
        }

    def requests(self, tasks: Sequence[Task]) -> list[EpisodeRequest]:
        """`group_size` siblings of each task; a sibling's seed depends on run, task and sibling only."""
        group_size, seed = self.config.algorithm.group_size, self.config.run.seed
        return [request for task in tasks for request in siblings(task, group_size, seed)]

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        values = {**values, **self.timer.take()}
        verdict = find_bottleneck(values)
        self.metrics.log(step, values if verdict is None else {**values, **verdict.metrics})

    async def step_metrics(self, assembled: Assembled, collected: Collected) -> dict[str, float]:
        """Numbers of the step that no stage reported by itself."""
        tokens = assembled.metrics.get("rollout/output_tokens", 0.0)
        scored = dict(await self.policy.stats())
        busy_s = scored["executor/score_s"]
        if (scorer := self.fleet.engine_scorer) is not None:
            scored |= scorer.stats()
            busy_s += scored["scoring/engine_busy_s"]
        self.progress.scoring_busy_s += busy_s
        self.progress.scoring_exposed_s += collected.exposed_logprobs_s
        return {
            **assembled.metrics,
            **await self.fleet.rollouts.stats(),
            **await self.fleet.search.stats(),
            **self.fleet.retrieval.stats(),
            **scored,
            **scoring_metrics(busy_s, collected.exposed_logprobs_s),
            "rollout/output_tokens_per_s": tokens / max(collected.generation_s, 1e-9),
            "time/generation_s": collected.generation_s,
            "reward/kl_coef": self.progress.kl_coef,
            "reward/exposed_s": collected.outcomes_s,
            "policy/num_restarts": float(self.num_gang_restarts),
        }

    # -- trajectory log ---------------------------------------------------------------------------------

    async def log_trajectories(self, name: str, samples: Sequence[Sample], assembled: Assembled | None) -> list[Logged]:
        """Write all trajectories with what was said about them. Those whose payload went with its node are left out:
        had it been trained on, the ranks would have missed it too, and the step is done again.
        """
        kept = [sample for sample in samples if sample.finished.payload is not None]
        read = await asyncio.gather(*(self._payload(sample) for sample in kept))
        logged = [(sample, batch) for sample, batch in zip(kept, read, strict=True) if batch is not None]
        advantages = assembled.advantages if assembled is not None else {}
        kl_coef = assembled.kl_coef if assembled is not None else 0.0
        tables = log_tables([batch for _, batch in logged], [sample for sample, _ in logged], advantages, kl_coef)
        await asyncio.to_thread(self.folder.write_trajectories, name, tables)
        excluded = [s for s in samples if s.excluded_because is not None]
        self.folder.append_jsonl(
            "excluded.jsonl",
            [{"file": name, "task_id": s.key[0], "sibling": s.key[1], "reason": s.excluded_because} for s in excluded],
        )
        return logged

    async def _payload(self, sample: Sample) -> TrajectoryBatch | None:
        """None: it is lost."""
        assert sample.finished.payload is not None
        try:
            return await self.fleet.payloads.read(sample.finished.payload)
        except PayloadLost:
            return None

    def _unlogged(self, samples: Sequence[Sample], logged: Sequence[Logged]) -> set[tuple[str, int]]:
        """Keys of the trajectories that the log has lost.

        Raises:
            PayloadLost: they are more than `run.max_excluded_share`.
        """
        lost = {sample.key for sample in samples if sample.finished.payload is not None}
        lost -= {sample.key for sample, _ in logged}
        limit = self.config.run.max_excluded_share
        if len(lost) > limit * len(samples):
            raise PayloadLost(
                f"payloads of {len(lost)} of {len(samples)} trajectories were lost with their nodes before they were "
                f"logged; run.max_excluded_share is {limit:.0%}"
            )
        return lost

    # -- evaluation -------------------------------------------------------------------------------------

    async def evaluate(self, name: str, forced: Mapping[str, tuple] | None = None) -> tuple[list[Evaluated], dict]:
        """Greedy episodes on the held-out questions. `forced`: memories by task that replace the policy's own."""
        requests = [
            EpisodeRequest(task, 0, 0, greedy=True, forced_memory_S=forced.get(task.task_id) if forced else None)
            for task in self.held_out
        ]
        self.display.stage("evaluation" if forced is None else "evaluation, memories swapped", len(requests))
        with self.timer.stage("evaluation"):
            collected = await collect(
                requests,
                self.fleet.rollouts,
                self.fleet.rewards,
                None,
                self.config,
                self.version,
                self.display.advance,
            )
        kept = [s for s in collected.samples if s.excluded_because is None]
        kind = "eval" if forced is None else "eval_swapped"
        logged = await self.log_trajectories(f"{kind}_{name}", collected.samples, None)
        check_excluded(collected.samples, self.config)
        counted = {s.key for s in kept} - self._unlogged(collected.samples, logged)
        trajectories = [trajectory for _, batch in logged for trajectory in batch.trajectories()]
        results = [evaluated(t) for t in trajectories if (t.task.task_id, t.sibling) in counted]
        # taken here, so that they are not the next step's
        counts = {**await self.fleet.rollouts.stats(), **await self.fleet.search.stats()}
        return results, {
            **{f"eval/{name.removeprefix('rollout/').replace('/', '_')}": value for name, value in counts.items()},
            **aggregate(results),
            "eval/reward_mean": float(np.mean([s.outcome for s in survivors_of(kept)])),
            "eval/num_excluded": float(len(requests) - len(counted)),
        }

    async def evaluate_swapped(self, name: str) -> float:
        """EM when each `<mem>` is one of another question (recorded by `evaluate(name)`)."""
        table = await asyncio.to_thread(read_memories, self.folder.trajectory_file(f"eval_{name}"))
        tasks = list(table)
        swapped = dict(zip(tasks, swapped_memories([table[task] for task in tasks]), strict=True))
        _, values = await self.evaluate(name, swapped)
        return values["eval/em"]

    def _note_best(self, step: int, values: Mapping[str, float]) -> None:
        """Of equally good steps the newest is kept."""
        if "eval/em" in values and values["eval/em"] >= self.progress.best_em:
            self.progress.best_em, self.progress.best_step = values["eval/em"], step

    # -- checkpoints ------------------------------------------------------------------------------------

    async def save(self, step: int, values: Mapping[str, float]) -> None:
        """A complete checkpoint (policy, positions, results) and its Hugging Face export; old ones are pruned."""
        self._note_best(step, values)
        self.progress.step = step
        self.display.stage(f"step {step}: checkpoint")
        extra = {
            "progress": {**asdict(self.progress), "seconds": self.seconds},
            "source": self.source.state(),
            "next": self._next_requests(),
        }
        with self.timer.stage("checkpoint"):
            await self._write_checkpoint(step, extra)

    async def _write_checkpoint(self, step: int, extra: Mapping[str, object]) -> None:
        uri = self._checkpoint(step)
        await self.policy.save(uri, extra)
        self.newest_checkpoint = uri
        await self._prune()
        if self.mirror is not None:
            await asyncio.to_thread(self.mirror.push, self.folder.root)

    def _checkpoint(self, step: int) -> str:
        """Path, or URI where `run.dir` is one."""
        run = self.folder.root.name
        return self.mirror.checkpoint(run, step) if self.mirror else str(self.folder.checkpoint(step))

    async def _prune(self) -> None:
        """Keep the newest checkpoints and the best by EM."""
        kept = self.config.run.keep_checkpoints, self.progress.best_step
        if self.mirror is None:
            await asyncio.to_thread(self.folder.prune, *kept)
        else:
            await asyncio.to_thread(self.mirror.prune, self.folder.root.name, *kept)

    async def recover(self, lost: GangLost) -> None:
        """Start lost ranks again from the newest checkpoint. The step counter goes back with it, versions never do.

        Raises:
            GangLost: `policy.max_restarts` are used up.
        """
        assert self.newest_checkpoint is not None  # `start` has written or read one
        ceiling = self.config.policy.max_restarts
        if self.num_gang_restarts == ceiling:
            raise GangLost(
                f"{lost}; all restarts are used (policy.max_restarts={ceiling}); the newest checkpoint is "
                f"{self.newest_checkpoint}: go on with run.resume=auto"
            ) from lost
        self.num_gang_restarts += 1
        self.display.say(f"policy ranks lost ({lost}); going back to {self.newest_checkpoint}")
        now = self.progress
        with self.timer.stage("recovery"):
            await self.policy.restart(self.version)
            await self._restore(self.newest_checkpoint)
        # neither this process's clock nor what was measured before RL has gone back
        self.progress = replace(self.progress, seconds=now.seconds, cold_start=now.cold_start, probes=now.probes)

    async def _restore(self, checkpoint: str) -> dict[str, float]:
        """Bring everything back, prove that the next step is the one that would have come, sync the engines.

        Returns the metrics of the sync.
        """
        self.display.stage(f"restoring {checkpoint}")
        extra = await self.policy.load(checkpoint)
        self.newest_checkpoint = checkpoint
        self.progress = Progress(**extra["progress"])
        self.source.restore(extra["source"])
        if differing := first_difference(self._next_requests(), extra["next"]):
            raise TrainingError(
                f"{checkpoint}: the next step would not be the one that was to come ({differing}); data.train, "
                "run.seed, data.tasks_per_step and algorithm.group_size must be those of the checkpoint"
            )
        self.folder.rewind(self.progress.step)
        return await self.sync()

    def _next_requests(self) -> list[list]:
        """[task id, sibling, seed] of the next step's episodes, without moving the source."""
        state = self.source.state()
        requests = self.requests(self.source.next(self.config.data.tasks_per_step))
        self.source.restore(state)
        return [[r.task.task_id, r.sibling, r.seed] for r in requests]

    def report(self, summary: Mapping[str, object] | None) -> None:
        """The last words: a short table, or how to go on."""
        if summary is None:
            self.display.say(f"stopped after step {self.progress.step}; go on with run.resume=auto")
        else:
            self.display.say(summary_table(summary, self.folder.root))

    # -- the end ----------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Since the start of the process, and of earlier processes of this run."""
        return self.progress.seconds + time.time() - psutil.Process().create_time()

    async def finish(self) -> dict[str, object]:
        """The last evaluation, summary.json and the picture."""
        name = f"step_{self.progress.step:04d}_final"
        results, values = await self.evaluate(name)
        self._note_best(self.progress.step, values)
        await self._prune()
        summary: dict[str, object] = {"em_final": values["eval/em"], "f1_final": values["eval/f1"]}
        summary |= {
            key.removeprefix("eval/"): values[key] for key in ("eval/total_tokens_mean", "eval/peak_tokens_mean")
        }
        if before := self.progress.cold_start:
            both = [(before[r.task_id][0], r.em) for r in results if r.task_id in before]
            gain, low, high = paired_interval(*zip(*both, strict=True))
            summary |= {
                "em_cold_start": float(np.mean([em for em, _ in before.values()])),
                "format_cold_start": float(np.mean([valid for _, valid in before.values()])),
                "em_gain": gain,
                "em_gain_low": low,
                "em_gain_high": high,
                "num_questions": len(both),
            }
        if self.config.eval.memory_swap:
            summary["em_memory_swapped"] = await self.evaluate_swapped(name)
        scoring = scoring_metrics(self.progress.scoring_busy_s, self.progress.scoring_exposed_s)
        summary |= {
            **self.progress.probes,
            "steps": self.progress.step,
            "drift_turns": self.progress.drift_turns,
            "max_logprob_gap": self.progress.max_logprob_gap,
            **{name.replace("/", "_"): value for name, value in scoring.items()},
            "peak_pss_gb": self.memory.peak_gb,
            "seconds": self.seconds,
        }
        self.log_metrics(self.progress.step, values)
        self.folder.write_json("summary.json", summary)
        await asyncio.to_thread(
            draw_learning_curve, self.folder.read_metrics(), self.folder.root / "learning_curve.png"
        )
        return summary
