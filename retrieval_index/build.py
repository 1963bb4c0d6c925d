"""Build an index folder: passages → vectors → FAISS, and BM25, in a temporary folder that is renamed at the end.

    write_passages ──▶ passages.arrow ──embed (or --embeddings FILE)──▶ VectorFile ──train, add──▶ vectors.faiss
                             └──────────────────── stems ──────────────────────────────────────▶ bm25/

    on a kill      the temporary folder `.NAME.partial` stays; the next build of the same folder goes on from its
                   passages and vectors if corpus and encoder are the same; else it is refused, unless it may overwrite
    on bad input   nothing stays but what a killed build had left
    two at once    the second is refused: the temporary folder is locked

The vectors of a build live in one file on disk, not in memory, and FAISS is fed from it in slices. The same input gives
the same files, however often the build was killed; an HNSW graph only with `deterministic`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import faiss
import numpy as np

from retrieval_index import bm25
from retrieval_index.corpus import DocumentLike, PassageStore, read_corpus, write_passages
from retrieval_index.encoder import Encoder, normalise
from retrieval_index.errors import BuildError
from retrieval_index.manifest import (
    BM25_FOLDER,
    FORMAT_VERSION,
    MANIFEST_FILE,
    PASSAGES_FILE,
    VECTORS_FILE,
    EncoderRecord,
    FileStamp,
    Manifest,
)
from retrieval_index.partial_folder import partial_folder, replace_folder, sync_tree
from retrieval_index.plan import DENSE_KINDS, KINDS, IndexPlan, Tuning, describe, describe_bm25, plan_index
from retrieval_index.vector_file import ROWS_PER_SLICE, VectorFile, delete_others

INPUTS_FILE = "inputs.json"  # of a build that is not finished: what its passages were read from

Progress = Callable[[int, int], None]
"""Called with (passages done, passages in all): once before the first is encoded, then after each slice."""

Announce = Callable[[str], None]
"""Called with a line about each stage."""

EmbedPass = Callable[[Path, Encoder, VectorFile, Progress], None]
"""Fill what is missing of a `VectorFile` from a passages file: `embed` here, or `distributed.RayEmbedding`."""


def build_index(
    corpus: str | Path | Iterable[DocumentLike],
    encoder: Encoder | None,
    kind: str,
    out_dir: str | Path,
    *,
    embeddings: str | Path | None = None,
    dense_kind: str = "flat",
    tuning: Tuning | None = None,
    deterministic: bool = False,
    overwrite: bool = False,
    embed_pass: EmbedPass | None = None,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Manifest:
    """Index a corpus file (see `read_corpus`), or passages given as objects with `id`, `title`, `text`.

    Args:
        encoder: None only for kind bm25, which takes no notice of one.
        kind: flat, ivf, hnsw, ivfpq, bm25, or hybrid (bm25 beside `dense_kind`).
        out_dir: the index folder; appears whole or not at all.
        embeddings: `.npy` of [n, dim], row i for passage i, in place of the encoder pass. The encoder still
            says what will encode the queries.
        tuning: overrides of the parameters that `plan_index` chooses.
        deterministic: FAISS works in one thread, so that an HNSW graph is the same each time.
        overwrite: replace an existing folder, and vectors that a killed build has left there with another encoder or
            from another corpus.
        embed_pass: in place of the encoder in this process.
        announce: takes a line about each stage.

    Raises:
        CorpusError: missing file, bad line, duplicate id, no passage.
        BuildError: folder exists, cannot be written, or holds another build's vectors; wrong embeddings, unknown kind,
            another build is running.
    """
    out_dir, encoder = Path(out_dir), None if kind == "bm25" else encoder
    if kind not in KINDS or dense_kind not in DENSE_KINDS:
        raise BuildError(f"unknown kind {kind!r} or {dense_kind!r}", "kind", f"use one of {', '.join(KINDS)}")
    if kind != "bm25" and encoder is None:
        raise BuildError(f"kind {kind} needs an encoder", "encoder", "name one, or use kind bm25")
    if out_dir.exists() and not overwrite:
        raise BuildError(f"{out_dir} exists", "out", "choose another folder, or pass overwrite")
    announce = announce or (lambda line: None)
    with partial_folder(out_dir) as folder:
        _clear(folder)
        if encoder is None or embeddings is not None:
            delete_others(folder, set(), overwrite)
        count, sources = _write_passages(folder, corpus)
        num_threads = 1 if deterministic else faiss.omp_get_max_threads()
        plan = None
        if encoder is not None:
            plan = plan_index(dense_kind if kind == "hybrid" else kind, count, encoder.dim, tuning)
            announce(describe(plan, count, encoder.dim, num_threads, given_vectors=embeddings is not None))
            if embeddings is not None:
                vectors = _given_vectors(Path(embeddings), count, encoder.dim)
            else:
                file = _vector_file(folder, count, encoder, overwrite)
                (embed_pass or embed)(folder / PASSAGES_FILE, encoder, file, progress or _silent)
                vectors = file.array()
            _write_vectors(folder / VECTORS_FILE, plan, vectors, _is_normalised(encoder), num_threads, announce)
        if kind in ("bm25", "hybrid"):
            announce(describe_bm25(count))
            bm25.write_bm25(PassageStore(folder / PASSAGES_FILE).all_texts(), folder / BM25_FOLDER)
        manifest = _write_manifest(folder, kind, plan, encoder, count, sources | stamp_sources((), embeddings))
        sync_tree(folder)
        replace_folder(folder, out_dir)
    return manifest


def _silent(done: int, total: int) -> None:
    """No progress."""


def stamp_sources(corpus: str | Path | Iterable[DocumentLike], embeddings: str | Path | None) -> dict[str, FileStamp]:
    """Size and checksum of the input files: an index with other `sources` in its manifest is out of date."""
    named = {"corpus": corpus, "embeddings": embeddings}
    return {name: FileStamp.of(Path(file)) for name, file in named.items() if isinstance(file, str | Path)}


def _clear(folder: Path) -> None:
    """Of a build that was killed only passages and vectors are kept: the rest takes minutes, and is of another kind."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (PASSAGES_FILE, INPUTS_FILE) and not path.name.startswith("vectors-"):
            path.unlink()


# --- passages ------------------------------------------------------------------------------------------------


def _write_passages(folder: Path, corpus: str | Path | Iterable[DocumentLike]) -> tuple[int, dict[str, FileStamp]]:
    """Write passages.arrow, or keep the one that a killed build has made of the same file. Passages that are given
    in memory are always written: their vectors are found again by the checksum of that file.

    Returns their number, and the stamp of the corpus before it was read: where it changes during the build, the index
    is out of date."""
    path, inputs = folder / PASSAGES_FILE, folder / INPUTS_FILE
    if not isinstance(corpus, str | Path):
        inputs.unlink(missing_ok=True)
        return write_passages(enumerate(corpus, start=1), path, source="the given passages"), {}
    rows = read_corpus(corpus)
    stamps = stamp_sources(corpus, None)
    now = json.dumps({name: asdict(stamp) for name, stamp in stamps.items()})
    if inputs.is_file() and inputs.read_text(encoding="utf-8") == now:
        return len(PassageStore(path)), stamps
    inputs.unlink(missing_ok=True)
    count = write_passages(rows, path, source=str(corpus))
    inputs.write_text(now, encoding="utf-8")
    return count, stamps


# --- vectors -------------------------------------------------------------------------------------------------


def _vector_file(folder: Path, count: int, encoder: Encoder, overwrite: bool) -> VectorFile:
    made_from = f"{FileStamp.of(folder / PASSAGES_FILE).sha256} {encoder.fingerprint}"
    return VectorFile(folder, count, encoder.dim, made_from, may_delete=overwrite)


def embed(passages: Path, encoder: Encoder, file: VectorFile, progress: Progress) -> None:
    """Encode the slices that are missing, in this process."""
    store, missing = PassageStore(passages), file.missing()
    done = file.count - sum(file.stop(start) - start for start in missing)
    progress(done, file.count)
    for start in missing:
        stop = file.stop(start)
        file.write(start, encoder.encode_passages(store.embedding_texts(start, stop)))
        done += stop - start
        progress(done, file.count)


def _given_vectors(path: Path, count: int, dim: int) -> np.ndarray:
    try:
        vectors = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise BuildError(f"cannot read {path}: {error}", "embeddings", "give a .npy file") from error
    if vectors.shape != (count, dim):
        raise BuildError(
            f"{path} has shape {vectors.shape}, corpus and encoder need {(count, dim)}",
            "embeddings",
            "row i must be the vector of passage i, made by this encoder",
        )
    return vectors


def _is_normalised(encoder: Encoder) -> bool:
    return encoder.settings.get("normalised", True)


def _write_vectors(
    path: Path,
    plan: IndexPlan,
    vectors: np.ndarray,
    normalised: bool,
    num_threads: int,
    announce: Callable[[str], None],
) -> None:
    threads_before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_threads)
    try:
        faiss.write_index(fill_index(plan, vectors, normalised, announce), str(path))
    finally:
        faiss.omp_set_num_threads(threads_before)


def fill_index(
    plan: IndexPlan, vectors: np.ndarray, normalised: bool = True, announce: Announce = lambda line: None
) -> faiss.Index:
    """Train on a sample with a fixed seed and add all rows: the same vectors give the same index.

    Args:
        vectors: [n, dim], float32 or float16, in memory or mapped.
        normalised: scale rows to length 1. Given embeddings may be float16, whose rounding leaves lengths off
            by 5e-4.
    """
    count, dim = vectors.shape
    index = faiss.index_factory(dim, plan.factory, faiss.METRIC_INNER_PRODUCT)
    for name, value in plan.build.items():
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    if not index.is_trained:
        announce(f"training on {plan.num_training_rows:,} vectors")
        rows = np.sort(np.random.default_rng(0).choice(count, plan.num_training_rows, replace=False))
        index.train(_checked_rows(vectors[rows], normalised))
    announce(f"adding {count:,} vectors")
    rows_per_add = ROWS_PER_SLICE * max(1, 16 * 1024 // dim)  # 64 MB: large enough for a matrix product
    for start in range(0, count, rows_per_add):
        index.add(_checked_rows(vectors[start : start + rows_per_add], normalised))
    return index


def _checked_rows(vectors_SD: np.ndarray, normalised: bool) -> np.ndarray:
    if not np.isfinite(vectors_SD).all():
        raise BuildError("a vector holds NaN or infinity", "embeddings", "make the vectors again")
    rows_SD = vectors_SD.astype(np.float32)
    return normalise(rows_SD) if normalised else rows_SD


# --- manifest ------------------------------------------------------------------------------------------------


def _write_manifest(
    folder: Path, kind: str, plan: IndexPlan | None, encoder: Encoder | None, count: int, sources: dict[str, FileStamp]
) -> Manifest:
    """Describe the folder, and remove what only the build needed."""
    (folder / INPUTS_FILE).unlink(missing_ok=True)
    for scratch in folder.glob("vectors-*"):
        scratch.unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kind=kind,
        factory="+".join(([plan.factory] if plan else []) + (["BM25"] if kind in ("bm25", "hybrid") else [])),
        metric={"bm25": "bm25", "hybrid": "reciprocal_rank"}.get(kind, "inner_product"),
        dim=encoder.dim if encoder else 0,
        count=count,
        search=plan.search if plan else {},
        encoder=EncoderRecord(encoder.name, encoder.fingerprint, encoder.settings) if encoder else None,
        bm25=bm25.PARAMETERS if kind in ("bm25", "hybrid") else None,
        sources=sources,
        files={path.relative_to(folder).as_posix(): FileStamp.of(path) for path in files},
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest
