"""The encoder pass as a Ray Data job: the bytes of the plain pass, and a job that is taken up again."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import ray

from retrieval_index.build import build_index
from retrieval_index.corpus import Document
from retrieval_index.distributed import RayEmbedding
from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import EmbeddingFailed
from retrieval_index.vector_file import ROWS_PER_SLICE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COUNT = 9 * ROWS_PER_SLICE + 100
CORPUS = [Document(f"d{i}", "", f"mentor n{i} n{i * 7 % COUNT} .") for i in range(COUNT)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def test_two_workers_make_the_vectors_of_the_plain_pass(tmp_path: Path) -> None:
    plain = build_index(CORPUS, HashEncoder(64), "flat", tmp_path / "plain")
    seen: list[tuple[int, int]] = []
    by_ray = build_index(
        CORPUS,
        HashEncoder(64),
        "flat",
        tmp_path / "ray",
        embed_pass=RayEmbedding(max_workers=2),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert by_ray == plain
    assert (seen[0], seen[-1], len(seen)) == ((0, COUNT), (COUNT, COUNT), 11)


def test_a_job_goes_on_from_what_a_plain_pass_left(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class MortalEncoder(HashEncoder):
        slices_left = 4

        def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
            if self.slices_left == 0:
                raise Killed
            self.slices_left -= 1
            return super().encode_passages(texts)

    with pytest.raises(Killed):
        build_index(CORPUS, MortalEncoder(64), "flat", tmp_path / "index")
    seen: list[int] = []
    by_ray = build_index(
        CORPUS,
        HashEncoder(64),
        "flat",
        tmp_path / "index",
        embed_pass=RayEmbedding(max_workers=1),
        progress=lambda done, total: seen.append(done),
    )
    assert seen[0] == 4 * ROWS_PER_SLICE
    assert by_ray.files == build_index(CORPUS, HashEncoder(64), "flat", tmp_path / "plain").files


def test_workers_that_fail_are_one_error_and_the_work_stays(tmp_path: Path) -> None:
    class UnknownElsewhere(HashEncoder):
        """Its record makes an encoder of another fingerprint on the workers."""

        def __init__(self) -> None:
            super().__init__(64)
            self.fingerprint = "of another machine"

    with pytest.raises(EmbeddingFailed, match="is another encoder on this node"):
        build_index(CORPUS, UnknownElsewhere(), "flat", tmp_path / "index", embed_pass=RayEmbedding(max_workers=1))
    assert [path.name for path in tmp_path.iterdir()] == [".index.partial"]
