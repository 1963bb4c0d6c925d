import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrieval_index.cli import app
from retrieval_index.encoder import preset_folder
from retrieval_index.errors import CorpusError, EncoderError
from retrieval_index.evaluate import Question, all_found, read_questions, recall

from .conftest import facts

SHARED = Path(os.environ.get("MEMPO_SHARED", Path(__file__).parents[4] / "shared")) / "data"


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stderr if code else result.stdout


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": d.id, "title": d.title, "text": d.text} for d in facts()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_build_info_search_verify_and_eval_work_on_one_folder(corpus: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    assert "24 passages" in run("build", "--corpus", corpus, "--out", index, "--encoder", "hash", "--dim", 256)
    assert json.loads(run("info", "--index", index))["dim"] == 256
    hits = [json.loads(line) for line in run("search", "--index", index, "mentor Boko", "--json").splitlines()]
    assert hits[0]["id"] == "mentor-Boko"
    assert "whole" in run("verify", "--index", index)
    questions = tmp_path / "questions.jsonl"
    rows = [
        {"question": "mentor Boko", "supporting_ids": ["mentor-Boko"]},
        {"question": "who knows", "supporting_ids": []},
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = json.loads(run("eval", "--index", index, "--questions", questions, "--json", "-"))
    assert figures == {"recall@3": 1.0, "recall@5": 1.0, "all@3": 1.0, "questions": 1}


def test_a_bad_input_is_one_line_and_exit_code_2(corpus: Path, tmp_path: Path) -> None:
    output = run("build", "--corpus", "absent.jsonl", "--out", tmp_path / "i", "--encoder", "hash", code=2)
    assert output.strip() == "error: corpus: there is no file absent.jsonl (check the path)"
    output = run("build", "--corpus", corpus, "--out", tmp_path / "i", "--encoder", tmp_path / "no", code=2)
    assert output.startswith("error: encoder: cannot read")


def test_recall_is_the_mean_share_and_all_needs_every_passage() -> None:
    questions = [Question("a", ("1", "2")), Question("b", ("3",))]
    found = [["1", "9", "2"], ["8", "9", "3"]]
    assert recall(found, questions, 1) == pytest.approx(0.25)
    assert recall(found, questions, 2) == pytest.approx(0.25)
    assert recall(found, questions, 3) == pytest.approx(1.0)
    assert all_found(found, questions, 3) == 1.0
    assert all_found(found, questions, 2) == 0.0


def test_a_question_file_without_gold_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a"}\n')
    with pytest.raises(CorpusError, match=r"q\.jsonl, line 1"):
        read_questions(path)
    path.write_text('{"question": "a", "supporting_ids": []}\n')
    with pytest.raises(CorpusError, match="no question with supporting ids"):
        read_questions(path)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "corpus.jsonl").is_file(), reason=f"no shared data at {SHARED}")
def test_minilm_flat_has_the_measured_recall_on_real_questions(tmp_path: Path) -> None:
    try:
        preset_folder("minilm")
    except EncoderError as absent:
        pytest.skip(str(absent))
    embeddings = SHARED / "corpus_minilm_fp16.npy"
    run("build", "--corpus", SHARED / "corpus.jsonl", "--out", tmp_path / "i", "--embeddings", embeddings)
    questions = SHARED / "dev.jsonl"
    figures = json.loads(run("eval", "--index", tmp_path / "i", "--questions", questions, "--json", "-"))
    assert figures["recall@3"] == pytest.approx(0.583, abs=0.005)
    assert figures["recall@5"] == pytest.approx(0.660, abs=0.005)
    assert figures["all@3"] == pytest.approx(0.270, abs=0.005)
