"""`python -m retrieval_index build | info | search | verify | eval`, also mounted as `mempo-ray index`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from retrieval_index import manifest as manifests
from retrieval_index.encoder import make_encoder, make_recorded_encoder
from retrieval_index.errors import RetrievalIndexError
from retrieval_index.manifest import Manifest
from retrieval_index.progress import TimeLeft

app = typer.Typer(help="Build, inspect and search passage indexes.", no_args_is_help=True)

P = ParamSpec("P")
IndexFolder = Annotated[Path, typer.Option("--index", help="Folder of the index.")]
EncoderName = Annotated[
    str | None, typer.Option("--encoder", help="Where the encoder of the manifest is now, if it moved.")
]


def _with_clear_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Exit code 2 and one line for a typed error, in place of a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except RetrievalIndexError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error

    return run


@app.command()
@_with_clear_errors
def build(
    corpus: Annotated[Path, typer.Option(help="Passages: .jsonl, .jsonl.gz or .parquet.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    encoder: Annotated[str, typer.Option(help="hash, minilm, or the folder of an encoder.")] = "minilm",
    kind: Annotated[str, typer.Option(help="flat, ivf, hnsw or ivfpq.")] = "flat",
    embeddings: Annotated[Path | None, typer.Option(help=".npy of prepared vectors, row i for passage i.")] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension of the hash encoder.")] = None,
    pooling: Annotated[str | None, typer.Option(help="mean or cls; default: what the folder says.")] = None,
    query_prefix: Annotated[str | None, typer.Option(help='For E5: "query: ".')] = None,
    passage_prefix: Annotated[str | None, typer.Option(help='For E5: "passage: ".')] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens at most; default: what the folder says.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, for the encoder.")] = "cpu",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing folder.")] = False,
) -> None:
    """Encode a corpus and write an index folder."""
    from retrieval_index.build import build_index

    given: dict[str, Any] = {
        "dim": dim,
        "pooling": pooling,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
        "max_length": max_length,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    manifest = build_index(
        corpus,
        make_encoder(encoder, device=device, **settings),
        kind,
        out,
        embeddings=embeddings,
        overwrite=overwrite,
        progress=_time_left(),
    )
    typer.echo(f"{out}: {_summary(manifest)}")


@app.command()
@_with_clear_errors
def info(index: IndexFolder) -> None:
    """Print the manifest."""
    typer.echo(manifests.check(index).to_json(), nl=False)


@app.command()
@_with_clear_errors
def verify(index: IndexFolder) -> None:
    """Compare every file with its checksum."""
    typer.echo(f"{index}: whole. {_summary(manifests.verify(index))}")


@app.command()
@_with_clear_errors
def search(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    index: IndexFolder,
    top_k: Annotated[int, typer.Option(min=1, help="Passages to show.")] = 5,
    encoder: EncoderName = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print the nearest passages."""
    from retrieval_index.index import PassageIndex

    chosen = make_recorded_encoder(manifests.load(index).encoder, encoder)
    opened = PassageIndex.open(index, encoder_fingerprint=chosen.fingerprint)
    rows, scores = opened.search(chosen.encode_queries([query]), top_k)
    for passage in opened.passages(rows[0], scores[0]):
        line = json.dumps(asdict(passage)) if as_json else f"{passage.score:.3f}  {passage.id}  {_one_line(passage)}"
        typer.echo(line)


@app.command("eval")
@_with_clear_errors
def evaluate(
    index: IndexFolder,
    questions: Annotated[Path, typer.Option(help="JSONL with `question` and `supporting_ids`.")],
    encoder: EncoderName = None,
    json_out: Annotated[str | None, typer.Option("--json", help="File for the figures; - is stdout.")] = None,
) -> None:
    """Recall on questions whose supporting passages are known."""
    from retrieval_index.evaluate import evaluate as measure
    from retrieval_index.evaluate import read_questions
    from retrieval_index.index import PassageIndex

    chosen = make_recorded_encoder(manifests.load(index).encoder, encoder)
    opened = PassageIndex.open(index, encoder_fingerprint=chosen.fingerprint)
    figures = measure(opened, chosen, read_questions(questions))
    if json_out is None:
        typer.echo("  ".join(f"{name} {value:g}" for name, value in figures.items()))
    elif json_out == "-":
        typer.echo(json.dumps(figures))
    else:
        Path(json_out).write_text(json.dumps(figures) + "\n", encoding="utf-8")


def main() -> None:
    """Entry point of `python -m retrieval_index`."""
    app()


def _summary(manifest: Manifest) -> str:
    size_mb = sum(stamp.num_bytes for stamp in manifest.files.values()) / 1e6
    return (
        f"{manifest.count:,} passages, {manifest.factory} over {manifest.dim} dimensions, "
        f"encoder {manifest.encoder.name}, {size_mb:.1f} MB"
    )


def _one_line(passage: Any) -> str:
    text = " ".join(f"{passage.title}: {passage.text}".split())
    return text if len(text) <= 100 else text[:99] + "…"


def _time_left() -> TimeLeft:
    """On stderr: one rewritten line in a terminal, else a line every 10 seconds."""
    terminal = sys.stderr.isatty()

    def write(line: str, last: bool) -> None:
        print(f"{line:<78}", end="\r" if terminal and not last else "\n", file=sys.stderr, flush=True)

    return TimeLeft(write, every_s=0.2 if terminal else 10.0)
