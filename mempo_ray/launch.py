"""A run from its configuration to an open `Session`: what to continue from, where to write, what to start.

Config ──find_checkpoint──▶ checkpoint ──open_run_folder──▶ RunFolder ──open_session──▶ Ray, plan, fleet, Session
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from mempo_ray.actors.cluster import connected
from mempo_ray.actors.fleet import open_fleet
from mempo_ray.actors.metrics_sink import RaySink
from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.job import STOP_WAIT, Job
from mempo_ray.config.load import resolved_yaml
from mempo_ray.config.models import model_folder, read_model_shape
from mempo_ray.config.schema import Config
from mempo_ray.contracts import Passage
from mempo_ray.data.tasks import TaskSource, read_tasks
from mempo_ray.data.world import is_synthetic, same_atlas
from mempo_ray.observability.alarms import AlarmSink
from mempo_ray.observability.metrics import Fanout, JsonlSink, TrackerSink
from mempo_ray.observability.mirror import Mirror, find_checkpoint
from mempo_ray.observability.progress import make_display
from mempo_ray.observability.resources import MemoryMonitor
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.observability.timing import StageTimer
from mempo_ray.placement.plan import make_plan
from mempo_ray.placement.ray_state import largest_shape, live_shape, view
from mempo_ray.placement.shape import ClusterShape, ClusterView
from mempo_ray.ports import MetricSink
from mempo_ray.preflight import check_local_runs, joins_a_cluster
from mempo_ray.rewards.rows import row_check
from mempo_ray.session import Session


@asynccontextmanager
async def open_session(config: Config, *, with_engines: bool = True) -> AsyncGenerator[tuple[Session, str | None]]:
    """A run from nothing: folder, Ray, plan, actors, display; closed in reverse order, whatever happens.

    Yields the session and the checkpoint that it should continue from, if any.
    """
    mirror = Mirror.of(config.run.dir)
    checkpoint = find_checkpoint(config.run, mirror)
    folder = open_run_folder(config, mirror, checkpoint)
    folder.write_text("config.yaml", resolved_yaml(config))
    folder.write_versions()
    display = make_display(config.run.steps)
    display.say(f"run folder: {folder.root}" + (f", copied to {mirror.uri}" if mirror else ""))
    if (job := Job.current()) is not None:
        folder.write_json("job.json", asdict(job))
        display.say(
            f"job {job.submission_id}: `ray job stop` gives this run {job.stop_wait_s:g} s to save and close "
            f"({STOP_WAIT} in the job's environment)"
        )
    alarms = AlarmSink(config.alarms, folder, display.say, folder.read_metrics())
    sinks: list[MetricSink] = [JsonlSink(folder), display, alarms]
    async with AsyncExitStack() as stack:
        stack.callback(display.close)
        if mirror is not None:
            stack.push_async_callback(asyncio.to_thread, mirror.push, folder.root)
        if config.trackers:
            tracker = TrackerSink(config.trackers, config.run.name, folder.root, {"config": resolved_yaml(config)})
            stack.callback(tracker.close)
            sinks.append(tracker)
        memory = stack.enter_context(MemoryMonitor())
        display.stage("starting Ray and the actors")
        stack.enter_context(connected(config, folder.root.name))
        sinks.append(RaySink(folder.root.name))
        plan = make_plan(config, shape_to_plan_for(config), read_model_shape(config.policy.model)).require()
        check_local_runs(config, plan)
        model_dir = model_folder(config.policy.model)
        columns = config.data.question_key, config.data.answer_key
        train_tasks = read_tasks(config.data.train, *columns, row_check(config.reward))
        held_out = read_tasks(config.data.eval, *columns, row_check(config.reward))
        fleet = await stack.enter_async_context(
            open_fleet(config, plan, model_dir, folder, synthetic_passages(config), with_engines=with_engines)
        )
        session = Session(
            config=config,
            folder=folder,
            mirror=mirror,
            fleet=fleet,
            renderer=Renderer.from_folder(model_dir, FileTokenizer.from_folder(model_dir), config.agent),
            source=TaskSource(train_tasks, config.run.seed, config.data.shuffle),
            train_tasks=tuple(train_tasks),
            held_out=tuple(held_out[: config.eval.tasks]),
            display=display,
            metrics=Fanout(sinks),
            memory=memory,
            timer=StageTimer(take_gb=memory.take_gb),
        )
        yield session, checkpoint


def shape_to_plan_for(config: Config) -> ClusterShape:
    """The most that the connected cluster can take; a local one never grows."""
    return largest_shape(config.placement.cluster_shape) if joins_a_cluster(config) else live_shape()


def look_at_cluster(config: Config) -> ClusterView:
    """The cluster that a run would join, for a dry run: nothing is reserved or started.

    Raises:
        InfrastructureError, ConfigError: as `connected`.
    """
    with connected(config, "plan"):
        return view(config.placement.cluster_shape)


def open_run_folder(config: Config, mirror: Mirror | None, checkpoint: str | None) -> RunFolder:
    """The folder of the run that `run.resume=auto` goes on with, or a new one."""
    runs = Path(config.run.dir) if mirror is None else mirror.runs
    if checkpoint is None or config.run.resume != "auto":
        return RunFolder.create(runs, config.run.name)
    run = checkpoint.split("/")[-3]  # …/<run>/checkpoints/step_…
    folder = RunFolder.open(runs / run if mirror is None else mirror.pull(run))
    folder.point_latest()
    return folder


def synthetic_passages(config: Config) -> Iterable[Passage]:
    """Passages of the synthetic worlds, where the configuration searches them."""
    if not is_synthetic(config.retrieval.corpus):
        return ()
    return same_atlas(config.data.train, config.data.eval).passages()
