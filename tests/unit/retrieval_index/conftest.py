"""A corpus of one-line facts, and an index of it."""

from pathlib import Path

import pytest

from retrieval_index.build import build_index
from retrieval_index.corpus import Document
from retrieval_index.encoder import HashEncoder

NAMES = ("Boko", "Sari", "Vela", "Kim", "Ruta", "Tano", "Mipe", "Lusu")
RELATIONS = ("mentor", "boss", "friend")


def facts() -> list[Document]:
    """Three facts per name: "mentor Boko Sari ." says that the mentor of Boko is Sari."""
    return [
        Document(f"{relation}-{name}", name, f"{relation} {name} {NAMES[(i + 1 + j) % len(NAMES)]} .")
        for i, name in enumerate(NAMES)
        for j, relation in enumerate(RELATIONS)
    ]


@pytest.fixture
def index_folder(tmp_path: Path) -> Path:
    build_index(facts(), HashEncoder(), "flat", tmp_path / "index")
    return tmp_path / "index"
