"""Checkpoints without training: `mempo-ray eval` and `mempo-ray ask`; and `mempo-ray sft`, which makes one.

    checkpoint folder ──▶ Config ──▶ check ──▶ actors without a policy ──▶ greedy episodes ──▶ EvalReport | Trajectory

A checkpoint is a run's `checkpoints/step_…` (its `hf` folder is served, the run's config.yaml and index are used) or
any Hugging Face folder. The engines vouch for the folder as it lies there (`generation.engine.unproven`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
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
from mempo_ray.observability.run_folder import COMPLETE, RunFolder
from mempo_ray.placement.plan import make_plan
from mempo_ray.rewards.rows import row_check

EXPORT = "hf"
"""Folder of a checkpoint that holds its model (training/checkpoint.py)."""


# -- from a checkpoint to a configuration ---------------------------------------------------------------------


def served_model(checkpoint: Path) -> Path:
    """The Hugging Face folder behind `--checkpoint`.

    Raises:
        ConfigError: an incomplete checkpoint, or a folder that is neither.
    """
    if (checkpoint / "facts.json").is_file() and not (checkpoint / COMPLETE).is_file():
        raise ConfigError(f"--checkpoint: {checkpoint} is an incomplete checkpoint (no file {COMPLETE}); name another")
    for folder in (checkpoint / EXPORT, checkpoint):
        if (folder / "config.json").is_file():
            return folder.resolve()
    found = sorted(marker.parent for folder in (checkpoint, checkpoint / "checkpoints", checkpoint.parent)
                   for marker in folder.glob(f"step_*/{COMPLETE}"))  # fmt: skip
    here = f"; there is {', '.join(map(str, found))}" if found else ""
    raise ConfigError(
        f"--checkpoint: {checkpoint} is neither a run's checkpoints/step_… nor a Hugging Face folder (no config.json)"
        f"{here}"
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


@asynccontextmanager
async def serving(config: Config, name: str, display: Display) -> AsyncGenerator[tuple[Fleet, RunFolder]]:
    """The actors of a run without its policy, and a folder `<name>-<time>` for their logs."""
    model_dir = model_folder(config.policy.model)
    folder = RunFolder.create(local_runs(config.run.dir), name, is_latest=False)
    display.stage("starting Ray and the actors")
    with connected(config, folder.root.name):
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
            yield fleet, folder


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


async def evaluate(checkpoint: Path, data: str, file: Path | None, overrides: Sequence[str]) -> EvalReport:
    """Greedy episodes on every row of `data` (a file or 'synthetic:eval').

    Raises:
        ConfigError, DataError: what the preflight finds.
        InfrastructureError: more than `run.max_excluded_share` of the episodes were broken; with the reasons.
    """
    config = served_config(checkpoint, file, overrides)
    measured = row_check(Reward(scorer="exact_match"))
    tasks = read_tasks(data, config.data.question_key, config.data.answer_key, measured)
    check(config, tasks)
    display = make_display(0, Console(stderr=True))
    try:
        async with serving(config, "eval", display) as (fleet, folder):
            display.stage("evaluation", len(tasks))
            trajectories, excluded = await greedy_episodes(fleet, tasks, display.advance)
            display.say(f"logs: {folder.root}")
    finally:
        display.close()
    if len(excluded) > config.run.max_excluded_share * len(tasks):
        raise InfrastructureError(
            f"eval: {len(excluded)} of {len(tasks)} episodes were broken, above run.max_excluded_share="
            f"{config.run.max_excluded_share:g}: {'; '.join(sorted(set(excluded))[:5])}"
        )
    return EvalReport.of(str(checkpoint), data, trajectories, len(excluded))


# -- ask ------------------------------------------------------------------------------------------------------


async def ask(checkpoint: Path, question: str, file: Path | None, overrides: Sequence[str]) -> Trajectory:
    """One greedy episode on a question of one's own. Raises as `evaluate`."""
    config = served_config(checkpoint, file, overrides)
    task = Task("ask", question, golds=(), data_source="ask")
    check(config, [task])
    display = make_display(0, Console(stderr=True))
    try:
        async with serving(config, "ask", display) as (fleet, _):
            trajectories, excluded = await greedy_episodes(fleet, [task])
    finally:
        display.close()
    if excluded:
        raise InfrastructureError(f"ask: {excluded[0]}")
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
