"""Is an index whole? Reads everything: checksums, and that its parts agree with each other."""

from __future__ import annotations

from pathlib import Path

from retrieval_index import manifest as manifests
from retrieval_index.corpus import PassageStore
from retrieval_index.errors import DamagedIndex
from retrieval_index.manifest import BM25_FOLDER, PASSAGES_FILE, Manifest


def verify_contents(folder: str | Path, **sources: str | Path) -> Manifest:
    """Compare every file with its checksum, count passages, vectors and inverted file, and compare the sources.

    Args:
        sources: `corpus` and/or `embeddings`: files that it should have been built from.

    Raises:
        The errors of `manifest.check`; DamagedIndex names the part that differs. StaleIndex: a source has changed.
    """
    from retrieval_index.bm25 import Bm25Index  # here, since the checksums are compared first
    from retrieval_index.index import PassageIndex

    folder = Path(folder)
    manifest = manifests.verify(folder)
    manifests.check_sources(manifest, **sources)
    counts = {"passages": len(PassageStore(folder / PASSAGES_FILE))}
    if manifest.bm25 is not None:
        counts["inverted file"] = len(Bm25Index(folder / BM25_FOLDER))
    if manifest.encoder is not None:
        PassageIndex.open(folder)  # compares the number and the width of the vectors
    for part, count in counts.items():
        if count != manifest.count:
            raise DamagedIndex(
                f"the {part} of {folder} count {count}, the manifest {manifest.count}", "index", manifests.BUILD_AGAIN
            )
    return manifest
