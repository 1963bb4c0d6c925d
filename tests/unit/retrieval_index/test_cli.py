import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrieval_index.cli import app
from retrieval_index.errors import CorpusError
from retrieval_index.evaluate import Question, all_found, read_questions, recall

from .conftest import facts


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


def test_a_hybrid_is_built_verified_against_its_corpus_and_searched(corpus: Path, tmp_path: Path) -> None:
    index, options = tmp_path / "index", ("--encoder", "hash", "--kind", "hybrid", "--dense-kind", "hnsw")
    assert "HNSW16,Flat+BM25" in run("build", "--corpus", corpus, "--out", index, *options, "--hnsw-links", 16)
    assert "whole" in run("verify", "--index", index, "--corpus", corpus)
    lines = run("search", "--index", index, "mentor Boko", "--json", "--top-k", 1).splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["mentor-Boko"]
    corpus.write_text(corpus.read_text().replace("Boko", "Koba"))
    assert "has changed since" in run("verify", "--index", index, "--corpus", corpus, code=2)


def test_bm25_needs_no_encoder_and_finds_what_there_is(corpus: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    output = run("build", "--corpus", corpus, "--out", index, "--kind", "bm25", "--encoder", "no such folder")
    assert "24 passages, BM25, 0.0 MB" in output
    assert len(run("search", "--index", index, "mentor", "--top-k", 1000).splitlines()) == 8
    assert run("search", "--index", index, "mentor " * 20_000, "--top-k", 1).count("\n") == 1
    assert run("search", "--index", index, " ", code=2).strip() == (
        "error: query: the query is empty (type what to look for)"
    )
    assert run("search", "--index", index, "caf\udce9", code=2).strip() == (
        "error: query: the query is not UTF-8 (type it again)"
    )


def test_a_corpus_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"id": "1", "text": "caf\xe9"}\n')
    output = run("build", "--corpus", tmp_path / "c.jsonl", "--out", tmp_path / "i", "--kind", "bm25", code=2)
    assert output.strip().endswith("line 1: it is not UTF-8 at byte 24 (mend or remove that line)")
    assert not list(tmp_path.glob(".i*"))
