"""Build an index folder: passages → vectors → FAISS, in a temporary folder that is renamed at the end.

    write_passages ──▶ passages.arrow ──embed (or --embeddings FILE)──▶ train on a sample, add ──▶ vectors.faiss

The vectors of a build live in one file on disk, not in memory, and FAISS is fed from it in slices.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

from retrieval_index.corpus import DocumentLike, PassageStore, read_corpus, write_passages
from retrieval_index.encoder import Encoder, normalise
from retrieval_index.errors import BuildError
from retrieval_index.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    PASSAGES_FILE,
    VECTORS_FILE,
    EncoderRecord,
    FileStamp,
    Manifest,
)

KINDS = ("flat", "ivf", "hnsw", "ivfpq")
ROWS_PER_SLICE = 1024
TRAINING_ROWS_PER_LIST = 64  # FAISS warns below 39 and gains little above 256
MIN_PQ_ROWS = 39 * 256  # for the 2^8 centroids of a sub-quantiser; fewer passages fit in memory anyway

Progress = Callable[[int, int], None]
"""Called with (passages done, passages in all)."""


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What to build: FAISS's factory string, rows to train on, and the parameters to search with."""

    factory: str
    num_training_rows: int
    search: dict[str, int]


def plan_index(kind: str, count: int, dim: int) -> IndexPlan:
    """Choose parameters from size alone.

    `flat` is exact. `ivf` has 4·√n lists and visits a quarter of them, at most 64 (0.98 of flat's top 6 on
    15,000 MiniLM vectors); `ivfpq` the same with dim/4 bytes a vector; `hnsw` has 32 links a node.

    Raises:
        BuildError: unknown kind, or too few passages to train it.
    """
    num_lists = max(1, min(int(4 * math.sqrt(count)), count // TRAINING_ROWS_PER_LIST))
    num_training_rows = min(count, num_lists * TRAINING_ROWS_PER_LIST)
    nprobe = {"nprobe": min(num_lists, max(8, min(num_lists // 4, 64)))}
    if kind == "flat":
        return IndexPlan("Flat", 0, {})
    if kind == "hnsw":
        return IndexPlan("HNSW32,Flat", 0, {"efSearch": 128})
    if kind == "ivf":
        return IndexPlan(f"IVF{num_lists},Flat", num_training_rows, nprobe)
    if kind == "ivfpq":
        if count < MIN_PQ_ROWS:
            raise BuildError(f"{count} passages are too few for ivfpq", "kind", "use kind flat")
        num_parts = next(parts for parts in range(max(1, dim // 4), 0, -1) if dim % parts == 0)
        # "np": no polysemous training, which takes minutes and serves a search that is not used here.
        factory = f"IVF{num_lists},PQ{num_parts}x8np"
        return IndexPlan(factory, max(num_training_rows, MIN_PQ_ROWS), nprobe)
    raise BuildError(f"unknown kind {kind!r}", "kind", f"use one of {', '.join(KINDS)}")


def build_index(
    corpus: str | Path | Iterable[DocumentLike],
    encoder: Encoder,
    kind: str,
    out_dir: str | Path,
    *,
    embeddings: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Index a corpus file (see `read_corpus`), or passages given as objects with `id`, `title`, `text`.

    Args:
        kind: flat, ivf, hnsw or ivfpq.
        out_dir: the index folder; appears whole or not at all.
        embeddings: `.npy` of [n, dim], row i for passage i, in place of the encoder pass. The encoder still
            says what will encode the queries.
        overwrite: replace an existing folder.

    Raises:
        CorpusError: missing file, bad line, duplicate id, no passage.
        BuildError: folder exists or cannot be written, wrong embeddings, unknown kind.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not overwrite:
        raise BuildError(f"{out_dir} exists", "out", "choose another folder, or pass overwrite")
    partial = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise BuildError(f"cannot write {partial}: {error.strerror}", "out", "choose another folder") from error
    try:
        manifest = _write_folder(partial, corpus, encoder, kind, embeddings, progress)
        _replace(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _write_folder(
    folder: Path,
    corpus: str | Path | Iterable[DocumentLike],
    encoder: Encoder,
    kind: str,
    embeddings: str | Path | None,
    progress: Progress | None,
) -> Manifest:
    passages = folder / PASSAGES_FILE
    if isinstance(corpus, str | Path):
        count = write_passages(read_corpus(corpus), passages, source=str(corpus))
    else:
        count = write_passages(enumerate(corpus, start=1), passages, source="the given passages")
    plan = plan_index(kind, count, encoder.dim)
    scratch = folder / "vectors.npy"
    if embeddings is None:
        vectors = _embed(PassageStore(passages), encoder, scratch, progress)
    else:
        vectors = _given_vectors(Path(embeddings), count, encoder.dim)
    faiss.write_index(_filled_index(plan, vectors), str(folder / VECTORS_FILE))
    scratch.unlink(missing_ok=True)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kind=kind,
        factory=plan.factory,
        metric="inner_product",
        dim=encoder.dim,
        count=count,
        search=plan.search,
        encoder=EncoderRecord(encoder.name, encoder.fingerprint, encoder.settings),
        sources=stamp_sources(corpus, embeddings),
        files={name: FileStamp.of(folder / name) for name in (VECTORS_FILE, PASSAGES_FILE)},
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def stamp_sources(corpus: str | Path | Iterable[DocumentLike], embeddings: str | Path | None) -> dict[str, FileStamp]:
    """Size and checksum of the input files: an index with other `sources` in its manifest is out of date."""
    named = {"corpus": corpus, "embeddings": embeddings}
    return {name: FileStamp.of(Path(file)) for name, file in named.items() if isinstance(file, str | Path)}


def _filled_index(plan: IndexPlan, vectors: np.ndarray) -> faiss.Index:
    count, dim = vectors.shape
    index = faiss.index_factory(dim, plan.factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        # A fixed seed: the same corpus gives the same lists.
        rows = np.sort(np.random.default_rng(0).choice(count, plan.num_training_rows, replace=False))
        index.train(_unit_rows(vectors[rows]))
    for start in range(0, count, ROWS_PER_SLICE):
        index.add(_unit_rows(vectors[start : start + ROWS_PER_SLICE]))
    return index


def _unit_rows(vectors_SD: np.ndarray) -> np.ndarray:
    """float32 rows of length 1. Given embeddings may be float16, whose rounding leaves lengths off by 5e-4."""
    if not np.isfinite(vectors_SD).all():
        raise BuildError("a vector holds NaN or infinity", "embeddings", "make the vectors again")
    return normalise(vectors_SD.astype(np.float32))


def _embed(store: PassageStore, encoder: Encoder, path: Path, progress: Progress | None) -> np.ndarray:
    count = len(store)
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count, encoder.dim))
    for start in range(0, count, ROWS_PER_SLICE):
        stop = min(count, start + ROWS_PER_SLICE)
        vectors[start:stop] = encoder.encode_passages(store.embedding_texts(start, stop))
        if progress:
            progress(stop, count)
    return vectors


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


def _replace(partial: Path, out_dir: Path) -> None:
    """Put the finished folder in place; an old one steps aside first, since a folder is not renamed over another."""
    if not out_dir.exists():
        partial.rename(out_dir)
        return
    old = out_dir.with_name(f".{out_dir.name}.old-{os.getpid()}")
    out_dir.rename(old)
    partial.rename(out_dir)
    shutil.rmtree(old)
