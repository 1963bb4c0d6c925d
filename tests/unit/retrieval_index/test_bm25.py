import subprocess
import sys
from pathlib import Path

import pytest

from retrieval_index.bm25 import Bm25Index, make_stems, write_bm25
from retrieval_index.errors import DamagedIndex

TEXTS = ["The mentor of Boko is Sari.", "Boko mentors nobody.", "Vela and Vela again.", "", "the of is"]


@pytest.fixture
def index(tmp_path: Path) -> Bm25Index:
    write_bm25(TEXTS, tmp_path / "bm25")
    return Bm25Index(tmp_path / "bm25")


def test_words_are_lower_case_stems_without_stop_words() -> None:
    assert make_stems()("The Mentors of a mentoring B, 2024") == ["mentor", "mentor", "2024"]


def test_rows_that_share_a_word_come_best_first_and_others_never(index: Bm25Index) -> None:
    rows, scores = index.search(["mentor of Boko Sari", "Vela", "nothing known"], 4)
    assert rows.tolist() == [[0, 1, -1, -1], [2, -1, -1, -1], [-1, -1, -1, -1]]
    assert scores[0, 0] > scores[0, 1] > 0


def test_equal_scores_come_in_the_order_of_the_rows(tmp_path: Path) -> None:
    write_bm25(["same words here"] * 50, tmp_path / "bm25")
    assert Bm25Index(tmp_path / "bm25").search(["same"], 10)[0].tolist() == [list(range(10))]


def test_a_k_larger_than_the_index_is_its_size_and_an_empty_query_finds_nothing(index: Bm25Index) -> None:
    rows, _ = index.search(["", "the of"], 100)
    assert rows.tolist() == [[-1] * len(TEXTS)] * 2


def test_a_query_of_a_hundred_thousand_characters_is_searched(index: Bm25Index) -> None:
    assert index.search(["mentor Sari " * 8_334], 1)[0].tolist() == [[0]]


def test_texts_without_any_word_can_be_indexed(tmp_path: Path) -> None:
    write_bm25(["", "the"], tmp_path / "bm25")
    assert Bm25Index(tmp_path / "bm25").search(["the mentor"], 2)[0].tolist() == [[-1, -1]]


def test_the_files_do_not_depend_on_the_hash_seed_of_the_process(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from retrieval_index.bm25 import write_bm25; "
    code += f"write_bm25({TEXTS!r}, Path(sys.argv[1]))"
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed)], env={"PYTHONHASHSEED": seed}, check=True, timeout=60
        )
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert [(tmp_path / "1" / name).read_bytes() for name in names] == [
        (tmp_path / "2" / name).read_bytes() for name in names
    ]


def test_a_file_that_is_no_inverted_file_is_damaged(tmp_path: Path) -> None:
    write_bm25(TEXTS, tmp_path / "bm25")
    (tmp_path / "bm25" / "indices.csc.index.npy").write_bytes(b"")
    with pytest.raises(DamagedIndex, match="cannot be read"):
        Bm25Index(tmp_path / "bm25")
