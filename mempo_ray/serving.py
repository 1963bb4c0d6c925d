"""Checkpoints without training: `mempo-ray eval` and `mempo-ray ask`; and `mempo-ray sft`, which makes one.

    checkpoint folder ──▶ Config ──▶ check ──▶ actors without a policy ──▶ greedy episodes ──▶ EvalReport | Trajectory

A checkpoint is a run's `checkpoints/step_…` (its `hf` folder is served, the run's config.yaml and index are used), a
run folder, which stands for its newest complete one, or any Hugging Face folder. The engines vouch for the folder as it
lies there (`generation.engine.unproven`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rich.console import Console

from mempo_ray import preflight
from mempo_ray.actors.cluster import connected
from mempo_ray.actors.fleet import Fleet, open_fleet
from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.load import load_file
from mempo_ray.config.models import model_folder, read_model_shape
from mempo_ray.config.schema import Config, Reward
from mempo_ray.contracts import EpisodeRequest, Task, Trajectory
from mempo_ray.data.tasks import read_tasks
from mempo_ray.errors import ConfigError, InfrastructureError
from mempo_ray.evaluation.report import EvalReport
from mempo_ray.generation.engine import unproven
from mempo_ray.launch import open_session, shape_to_plan_for, synthetic_passages
from mempo_ray.observability.mirror import local_runs
from mempo_ray.observability.progress import Display, make_display
from mempo_ray.observability.run_folder import COMPLETE, RunFolder, complete_checkpoints
from mempo_ray.placement.plan import make_plan
from mempo_ray.rewards.rows import row_check

EXPORT = "hf"
"""Folder of a checkpoint that holds its model (training/checkpoint.py)."""


# -- from a checkpoint to a configuration ---------------------------------------------------------------------


def served_model(checkpoint: Path) -> Path:
    """The Hugging Face folder behind `--checkpoint`; of a run, that of its newest complete checkpoint.

    Raises:
        ConfigError: an incomplete checkpoint, or a folder that is none of these.
    """
    if of_run := complete_checkpoints(checkpoint):
        checkpoint = of_run[-1]
    if (checkpoint / "facts.json").is_file() and not (checkpoint / COMPLETE).is_file():
        raise ConfigError(f"--checkpoint: {checkpoint} is an incomplete checkpoint (no file {COMPLETE}); name another")
    for folder in (checkpoint / EXPORT, checkpoint):
        if (folder / "config.json").is_file():
            return folder.resolve()
    found = complete_checkpoints(checkpoint.parent) or complete_checkpoints(checkpoint.parent.parent)
    here = f"; there is {', '.join(map(str, found))}" if found else ""
    raise ConfigError(
        f"--checkpoint: {checkpoint} is neither a run with a complete checkpoint, nor one of its checkpoints/step_…, "
        f"nor a Hugging Face folder (no config.json){here}"
    )


def served_config(checkpoint: Path, file: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration of the run that wrote the checkpoint, with its own model and index; then the overrides.

    Args:
        file: in place of the run's config.yaml; needed for a folder that no run wrote, unless the quickstart's fits.

    Raises:
        ConfigError: no model there, or a wrong key.
    """
    model = served_model(checkpoint)
    run = next((folder for folder in model.parents[:3] if (folder / "config.yaml").is_file()), None)
    own = [f"policy.model={json.dumps(str(model))}"]
    searches_elsewhere = file is not None or any(word.startswith("retrieval.") for word in overrides)
    if run is not None and (run / "index" / "manifest.json").is_file() and not searches_elsewhere:
        own.append(f"retrieval.index={json.dumps(str(run / 'index'))}")
    return load_file(file or (run and run / "config.yaml"), [*own, *overrides])


def check(config: Config, tasks: Sequence[Task]) -> None:
    """The part of the preflight that concerns a run without training. Raises ConfigError or DataError."""
    preflight.import_plugins(config)
    preflight.check_names(config)
    model = preflight.check_model_folder("--checkpoint", config.policy.model)
    preflight.check_retrieval(config)
    renderer = Renderer.from_folder(model, FileTokenizer.from_folder(model), config.agent)
    preflight.check_prompts(config, renderer, model, tasks)


@contextmanager
def kept_where_it_fails(folder: RunFolder, display: Display) -> Generator[None]:
    """Deletes the folder after the block, which leaves logs only; says where they are if the block fails."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed and any(folder.logs.iterdir()):
            display.say(f"logs: {folder.logs}")
        else:
            shutil.rmtree(folder.root, ignore_errors=True)  # a process that is ending may still write to its log


@asynccontextmanager
async def serving(config: Config, name: str, display: Display) -> AsyncGenerator[Fleet]:
    """The actors of a run without its policy. Their logs are in a folder `<name>-<time>` that a failure leaves."""
    model_dir = model_folder(config.policy.model)
    folder = RunFolder.create(local_runs(config.run.dir), name, is_latest=False)
    display.stage("starting Ray and the actors")
    with kept_where_it_fails(folder, display), connected(config, folder.root.name):
        plan = make_plan(
            config,
            shape_to_plan_for(config),
            read_model_shape(config.policy.model),
            with_policy=False,
        ).require()
        passages = () if config.retrieval.index else synthetic_passages(config)
        async with open_fleet(config, plan, model_dir, folder, passages, with_policy=False) as fleet:
            display.stage("waiting for the engines")
            await fleet.rollouts.sync(unproven(str(model_dir)))
            yield fleet


async def greedy_episodes(
    fleet: Fleet, tasks: Sequence[Task], on_finished: Callable[[], None] = lambda: None
) -> tuple[list[Trajectory], list[str]]:
    """One greedy episode per task: the trajectories in order of the tasks, and why others were excluded."""
    found: dict[str, Trajectory] = {}
    excluded: list[str] = []
    async for finished in fleet.rollouts.run([EpisodeRequest(task, 0, 0, greedy=True) for task in tasks]):
        if finished.summary.end_reason.is_infrastructure or finished.payload is None:
            excluded.append(f"{finished.summary.end_reason.value}: {finished.summary.detail}")
        else:
            (trajectory,) = (await fleet.payloads.read(finished.payload)).trajectories()
            found[trajectory.task.task_id] = trajectory
        on_finished()
    return [found[task.task_id] for task in tasks if task.task_id in found], excluded


# -- eval -----------------------------------------------------------------------------------------------------


def tasks_of(config: Config, data: str) -> tuple[list[Task], str]:
    """The first `eval.tasks` rows of `data` (a file or 'synthetic:eval'), and a sentence if there are more."""
    rows = read_tasks(data, config.data.question_key, config.data.answer_key, row_check(Reward(scorer="exact_match")))
    tasks = rows[: config.eval.tasks]
    return tasks, f"the first {len(tasks)} of {len(rows)} rows (eval.tasks)" if len(tasks) < len(rows) else ""


async def evaluate(checkpoint: Path, data: str, file: Path | None, overrides: Sequence[str]) -> EvalReport:
    """Greedy episodes on `tasks_of` the data.

    Raises:
        ConfigError, DataError: what the preflight finds.
        InfrastructureError: more than `run.max_excluded_share` of the episodes were broken; with the reasons.
    """
    config = served_config(checkpoint, file, overrides)
    tasks, left_out = tasks_of(config, data)
    check(config, tasks)
    display = make_display(0, Console(stderr=True))
    try:
        if left_out:
            display.say(left_out)
        async with serving(config, "eval", display) as fleet:
            display.stage("evaluation", len(tasks))
            trajectories, excluded = await greedy_episodes(fleet, tasks, display.advance)
            if len(excluded) > config.run.max_excluded_share * len(tasks):
                raise InfrastructureError(
                    f"eval: {len(excluded)} of {len(tasks)} episodes were broken, above run.max_excluded_share="
                    f"{config.run.max_excluded_share:g}: {'; '.join(sorted(set(excluded))[:5])}"
                )
    finally:
        display.close()
    return EvalReport.of(str(checkpoint), data, trajectories, len(excluded))


# -- ask ------------------------------------------------------------------------------------------------------


async def ask(checkpoint: Path, question: str, file: Path | None, overrides: Sequence[str]) -> Trajectory:
    """One greedy episode on a question of one's own. Raises as `evaluate`."""
    config = served_config(checkpoint, file, overrides)
    task = Task("ask", question, golds=(), data_source="ask")
    check(config, [task])
    display = make_display(0, Console(stderr=True))
    try:
        async with serving(config, "ask", display) as fleet:
            trajectories, excluded = await greedy_episodes(fleet, [task])
            if excluded:
                raise InfrastructureError(f"ask: {excluded[0]}")
    finally:
        display.close()
    return trajectories[0]


# -- sft ------------------------------------------------------------------------------------------------------


async def sft(config: Config) -> Path:
    """The cold start alone. Returns the model folder, inside a checkpoint that RL can start from (`run.resume`).

    Raises:
        ConfigError: the configuration has no `cold_start` section.
    """
    if config.cold_start is None:
        raise ConfigError("cold_start: this configuration has no such section; add one, e.g. cold_start.tasks=512")
    async with open_session(config, with_engines=False) as (session, _):
        await session.cold_start()
        await session.save(0, {})
        return session.folder.checkpoint(0) / EXPORT
