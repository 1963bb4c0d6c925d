"""The manifest of an index folder, and the cheap checks before one is opened (no torch, no FAISS).

An index is a folder:

    manifest.json     what it is: format, encoder, metric, dim, counts, size and SHA-256 of each file
    passages.arrow    id, title, text
    vectors.faiss     the FAISS index; row i is row i of the passages (not in kind bm25)
    bm25/             the inverted file, see `bm25` (in kinds bm25 and hybrid)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrieval_index.errors import (
    DamagedIndex,
    DimensionMismatch,
    EncoderMismatch,
    ForeignVersion,
    IndexMissing,
    StaleIndex,
)

FORMAT_VERSION = 2
MANIFEST_FILE, VECTORS_FILE, PASSAGES_FILE, BM25_FOLDER = "manifest.json", "vectors.faiss", "passages.arrow", "bm25"
BUILD_AGAIN = "build it again: python -m retrieval_index build --corpus … --out …"


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size and content of one file."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Reads the whole file."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, slots=True)
class EncoderRecord:
    """The encoder an index was built with: `make_encoder(name, **settings)` makes it again."""

    name: str
    fingerprint: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index is.

    `search` holds FAISS's search-time parameters (`nprobe`, `efSearch`); `encoder` is None and `dim` 0 in kind
    bm25; `bm25` holds the parameters of the inverted file, None where there is none; `sources` the `corpus` and
    `embeddings` files that it was built from (empty for passages given in memory).
    """

    format_version: int
    kind: str
    factory: str
    metric: str
    dim: int
    count: int
    search: Mapping[str, int]
    encoder: EncoderRecord | None
    bm25: Mapping[str, Any] | None
    sources: Mapping[str, FileStamp]
    files: Mapping[str, FileStamp]

    @property
    def index_id(self) -> str:
        """Names the content: equal for equal indexes, and part of every cache key."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError, KeyError or TypeError where the text is no manifest of this version."""
        fields = json.loads(text)
        record = fields.pop("encoder")
        encoder = None if record is None else EncoderRecord(**record)
        sources, files = (
            {name: FileStamp(**stamp) for name, stamp in fields.pop(key).items()} for key in ("sources", "files")
        )
        return cls(encoder=encoder, sources=sources, files=files, **fields)


def load(folder: str | Path) -> Manifest:
    """Read the manifest of an index folder.

    Raises:
        IndexMissing, ForeignVersion, DamagedIndex.
    """
    path = Path(folder) / MANIFEST_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IndexMissing(f"there is no index at {folder}", "index", BUILD_AGAIN) from error
    try:
        version = json.loads(text)["format_version"]
        if version != FORMAT_VERSION:
            raise ForeignVersion(
                f"{folder} has format {version}, this program reads format {FORMAT_VERSION}", "index", BUILD_AGAIN
            )
        return Manifest.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedIndex(f"{path} is not a manifest: {error!r}", "index", BUILD_AGAIN) from error


def check(folder: str | Path, *, encoder_fingerprint: str | None = None, dim: int | None = None) -> Manifest:
    """Load the manifest and refuse what must not be searched. Reads sizes, not contents (see `verify`).

    Args:
        encoder_fingerprint: of the encoder that will encode the queries; kind bm25 has none and compares nothing.
        dim: of its vectors.

    Raises:
        IndexMissing, ForeignVersion, DimensionMismatch, EncoderMismatch, DamagedIndex.
    """
    manifest = load(folder)
    if manifest.encoder is not None:
        _check_encoder(folder, manifest.encoder, manifest.dim, encoder_fingerprint, dim)
    for name, stamp in manifest.files.items():
        path = Path(folder) / name
        size = path.stat().st_size if path.is_file() else None
        if size != stamp.num_bytes:
            state = "is missing" if size is None else f"has {size} bytes instead of {stamp.num_bytes}"
            raise DamagedIndex(f"{path} {state}", "index", BUILD_AGAIN)
    return manifest


def _check_encoder(
    folder: str | Path, record: EncoderRecord, built_dim: int, fingerprint: str | None, dim: int | None
) -> None:
    if dim is not None and dim != built_dim:
        raise DimensionMismatch(
            f"{folder} holds vectors of dimension {built_dim}, the encoder makes {dim}",
            "encoder",
            f"search it with the encoder {record.name!r}, or build it again",
        )
    if fingerprint is not None and fingerprint != record.fingerprint:
        settings = ", ".join(f"{key}={value!r}" for key, value in record.settings.items())
        raise EncoderMismatch(
            f"{folder} was built with another encoder: {record.name!r} ({settings})",
            "encoder",
            "search it with that encoder, or build it again with this one",
        )


def check_sources(manifest: Manifest, **files: str | Path) -> None:
    """Compare the files that an index was built from with what they are now (reads them whole).

    Args:
        files: `corpus` and/or `embeddings`.

    Raises:
        StaleIndex: a file is another one, or has changed since.
    """
    for name, file in files.items():
        if not Path(file).is_file() or manifest.sources.get(name) != FileStamp.of(Path(file)):
            raise StaleIndex(f"{file} is not what the index was built from, or has changed since", name, BUILD_AGAIN)


def verify(folder: str | Path) -> Manifest:
    """`check`, and compare the content of every file with its checksum (reads the whole index).

    Raises:
        As `check`; DamagedIndex names the file that differs.
    """
    manifest = check(folder)
    for name, stamp in manifest.files.items():
        if FileStamp.of(Path(folder) / name) != stamp:
            raise DamagedIndex(f"{Path(folder) / name} differs from its checksum", "index", BUILD_AGAIN)
    return manifest
