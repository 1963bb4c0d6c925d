"""`python -m retrieval_index build | info | search | verify | eval | serve`, also mounted as `mempo-ray index`."""

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
from retrieval_index.encoder import make_encoder
from retrieval_index.encoder_presets import PRESETS
from retrieval_index.errors import QueryError, RetrievalIndexError
from retrieval_index.manifest import Manifest
from retrieval_index.plan import DENSE_KINDS, KINDS, Tuning
from retrieval_index.progress import TimeLeft
from retrieval_index.retriever import open_retriever
from retrieval_index.service import is_text

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
    corpus: Annotated[Path, typer.Option(help="Passages: .jsonl, .tsv (either also .gz) or .parquet.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    encoder: Annotated[str, typer.Option(help=f"hash, {', '.join(PRESETS)}, or an encoder's folder.")] = "minilm",
    kind: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}.")] = "flat",
    dense_kind: Annotated[str, typer.Option(help=f"Beside BM25 in kind hybrid: {', '.join(DENSE_KINDS)}.")] = "flat",
    embeddings: Annotated[Path | None, typer.Option(help=".npy of prepared vectors, row i for passage i.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Encode as a Ray Data job over all workers.")] = False,
    ray_address: Annotated[
        str | None, typer.Option(help="Of the cluster; default: the running one, or a new one.")
    ] = None,
    deterministic: Annotated[bool, typer.Option(help="FAISS in one thread: the same HNSW graph each time.")] = False,
    nlist: Annotated[int | None, typer.Option(min=1, help="ivf, ivfpq: inverted lists.")] = None,
    nprobe: Annotated[int | None, typer.Option(min=1, help="ivf, ivfpq: lists visited in a search.")] = None,
    pq_bytes: Annotated[int | None, typer.Option(min=1, help="ivfpq: bytes a vector.")] = None,
    training_rows: Annotated[int | None, typer.Option(min=1, help="ivf, ivfpq: vectors to train on.")] = None,
    hnsw_links: Annotated[int | None, typer.Option(min=2, help="hnsw: links of a node.")] = None,
    ef_construction: Annotated[int | None, typer.Option(min=1, help="hnsw: candidates of an insertion.")] = None,
    ef_search: Annotated[int | None, typer.Option(min=1, help="hnsw: candidates of a search.")] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension of the hash encoder.")] = None,
    pooling: Annotated[str | None, typer.Option(help="mean, cls, max or last; default: what the folder says.")] = None,
    query_prefix: Annotated[str | None, typer.Option(help='For E5: "query: ".')] = None,
    passage_prefix: Annotated[str | None, typer.Option(help='For E5: "passage: ".')] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens at most; default: what the folder says.")] = None,
    normalised: Annotated[bool | None, typer.Option(help="Vectors of length 1; default: yes, save contriever.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, for the encoder.")] = "cpu",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing folder, and what a killed build left.")] = False,
) -> None:
    """Encode a corpus and write an index folder. A build that was killed goes on where it was."""
    from retrieval_index.build import build_index

    given: dict[str, Any] = {
        "dim": dim,
        "pooling": pooling,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
        "max_length": max_length,
        "normalised": normalised,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    embed_pass = None
    if ray:
        from retrieval_index.distributed import RayEmbedding

        embed_pass = RayEmbedding(device=device, address=ray_address)
    manifest = build_index(
        corpus,
        None if kind == "bm25" else make_encoder(encoder, device=device, **settings),
        kind,
        out,
        embeddings=embeddings,
        dense_kind=dense_kind,
        tuning=Tuning(nlist, nprobe, pq_bytes, training_rows, hnsw_links, ef_construction, ef_search),
        deterministic=deterministic,
        overwrite=overwrite,
        embed_pass=embed_pass,
        progress=_time_left(),
        announce=lambda line: typer.echo(line, err=True),
    )
    typer.echo(f"{out}: {_summary(manifest)}")


@app.command()
@_with_clear_errors
def info(index: IndexFolder) -> None:
    """Print the manifest."""
    typer.echo(manifests.check(index).to_json(), nl=False)


@app.command()
@_with_clear_errors
def verify(
    index: IndexFolder,
    corpus: Annotated[Path | None, typer.Option(help="Also: was it built from this file, as it is now?")] = None,
    embeddings: Annotated[Path | None, typer.Option(help="The same for prepared vectors.")] = None,
) -> None:
    """Read everything: checksums, and counts of passages, vectors and words."""
    from retrieval_index.contents import verify_contents

    sources = {name: path for name, path in (("corpus", corpus), ("embeddings", embeddings)) if path is not None}
    typer.echo(f"{index}: whole. {_summary(verify_contents(index, **sources))}")


@app.command()
@_with_clear_errors
def search(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    index: IndexFolder,
    top_k: Annotated[int, typer.Option(min=1, help="Passages to show.")] = 5,
    encoder: EncoderName = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print the best passages: as many as there are, if that is less than asked for."""
    if not query.strip():
        raise QueryError("the query is empty", "query", "type what to look for")
    if not is_text(query):
        raise QueryError("the query is not UTF-8", "query", "type it again")
    retriever = open_retriever(index, encoder=encoder)
    hits = retriever.find([query], top_k)
    for passage in retriever.passages(hits.rows[0], hits.scores[0]):
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

    figures = measure(open_retriever(index, encoder=encoder), read_questions(questions))
    if json_out is None:
        typer.echo("  ".join(f"{name} {value:g}" for name, value in figures.items()))
    elif json_out == "-":
        typer.echo(json.dumps(figures))
    else:
        Path(json_out).write_text(json.dumps(figures) + "\n", encoding="utf-8")


@app.command()
@_with_clear_errors
def serve(
    index: IndexFolder,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, help="0 takes a free one and prints it.")] = 8000,
    top_k: Annotated[int, typer.Option(min=1, help="Passages of a request that names no topk.")] = 3,
    encoder: EncoderName = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, of encoder and index.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Of encoder and index each.")] = None,
    deadline_s: Annotated[float, typer.Option(min=0.001, help="Longest time of a request.")] = 30.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Queries in one encoder and index call.")] = 64,
    max_wait_s: Annotated[float, typer.Option(min=0, help="Longest wait of a query for company.")] = 0.005,
    max_queued: Annotated[int, typer.Option(min=1, help="Queries that may wait; above it the answer is 503.")] = 4096,
    cache_size: Annotated[int, typer.Option(min=0, help="Results kept in memory.")] = 100_000,
    disk_cache: Annotated[str, typer.Option(help="SQLite file of results that outlives the server.")] = "",
    disk_cache_size: Annotated[int, typer.Option(min=1, help="Results kept there.")] = 1_000_000,
    ray: Annotated[bool, typer.Option("--ray", help="Replicas as actors of a Ray cluster (RAY_ADDRESS).")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: how many.")] = 1,
) -> None:
    """Answer POST /retrieve over HTTP, in the form of Search-R1's server (see docs/retrieval.md)."""
    from retrieval_index.server import serve as answer
    from retrieval_index.service import RetrievalService, ServiceLimits

    limits = ServiceLimits(
        max_batch=max_batch,
        max_wait_s=max_wait_s,
        max_queued=max_queued,
        deadline_s=deadline_s,
        cache_size=cache_size,
        disk_cache=disk_cache,
        disk_cache_size=disk_cache_size,
    )
    open_service = functools.partial(
        RetrievalService.open,
        index.resolve(),
        encoder=encoder,
        device=device,
        num_threads=threads,
        limits=limits,
    )
    if ray:
        from retrieval_index.serving_pool import ReplicaPool

        searches = ReplicaPool(open_service, replicas, deadline_s, num_gpus=int(device == "cuda"))
    else:
        searches = open_service()
    answer(searches, index, host, port, top_k)


def main() -> None:
    """Entry point of `python -m retrieval_index`."""
    app()


def _summary(manifest: Manifest) -> str:
    size_mb = sum(stamp.num_bytes for stamp in manifest.files.values()) / 1e6
    dense = f" over {manifest.dim} dimensions, encoder {manifest.encoder.name}" if manifest.encoder else ""
    return f"{manifest.count:,} passages, {manifest.factory}{dense}, {size_mb:.1f} MB"


def _one_line(passage: Any) -> str:
    text = " ".join(f"{passage.title}: {passage.text}".split())
    return text if len(text) <= 100 else text[:99] + "…"


def _time_left() -> TimeLeft:
    """On stderr: one rewritten line in a terminal, else a line every 10 seconds."""
    terminal = sys.stderr.isatty()

    def write(line: str, last: bool) -> None:
        print(f"{line:<78}", end="\r" if terminal and not last else "\n", file=sys.stderr, flush=True)

    return TimeLeft(write, every_s=0.2 if terminal else 10.0)
