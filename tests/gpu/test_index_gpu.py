"""An index on GPUs finds what it finds on the CPU. Not run on machines without faiss-gpu and CUDA."""

from pathlib import Path

import faiss
import numpy as np
import pytest

from retrieval_index.build import build_index
from retrieval_index.corpus import Document
from retrieval_index.encoder import HashEncoder
from retrieval_index.gpu import GpuPlan, copy_to_gpus, free_bytes
from retrieval_index.index import PassageIndex

NUM_GPUS = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs faiss-gpu and a CUDA device"),
]

COUNT, WIDTH = 20_000, 64
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    vectors = np.random.default_rng(0).standard_normal((COUNT, WIDTH), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def build(folder: Path, vectors: np.ndarray, kind: str) -> Path:
    np.save(folder / "v.npy", vectors)
    corpus = [Document(str(i), "", "x") for i in range(COUNT)]
    build_index(corpus, HashEncoder(WIDTH), kind, folder / "index", embeddings=folder / "v.npy")
    return folder / "index"


@pytest.mark.parametrize("kind", ["flat", "ivf", "ivfpq"])
def test_a_gpu_finds_what_the_cpu_finds(tmp_path: Path, vectors: np.ndarray, kind: str) -> None:
    folder = build(tmp_path, vectors, kind)
    on_gpu, on_cpu = PassageIndex.open(folder, device="cuda"), PassageIndex.open(folder)
    assert on_gpu.device.startswith("cuda")
    rows, scores = on_gpu.search(vectors[:64], 10)
    cpu_rows, cpu_scores = on_cpu.search(vectors[:64], 10)
    assert np.mean(rows == cpu_rows) > 0.98
    np.testing.assert_allclose(scores, cpu_scores, atol=1e-3)


def test_hnsw_stays_on_the_cpu(tmp_path: Path, vectors: np.ndarray) -> None:
    assert PassageIndex.open(build(tmp_path, vectors, "hnsw"), device="cuda").device == "cpu (HNSW has no GPU form)"


@pytest.mark.parametrize(
    "plan",
    [
        GpuPlan((0,), float16=True),
        pytest.param(GpuPlan((0, 1)), marks=two_gpus),
        pytest.param(GpuPlan((0, 1), sharded=True), marks=two_gpus),
    ],
    ids=str,
)
def test_every_layout_finds_the_vector_itself(vectors: np.ndarray, plan: GpuPlan) -> None:
    index = faiss.IndexFlatIP(WIDTH)
    index.add(vectors)
    scores, rows = copy_to_gpus(index, plan).search(vectors[:64], 1)
    assert rows[:, 0].tolist() == list(range(64))
    np.testing.assert_allclose(scores, 1, atol=1e-2 if plan.float16 else 1e-5)


def test_every_gpu_tells_its_free_memory() -> None:
    assert all(free > 0 for free in free_bytes(NUM_GPUS))
