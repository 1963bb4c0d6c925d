import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retrieval_index.corpus import Document, PassageStore, embedding_text, read_corpus, write_passages
from retrieval_index.errors import CorpusError

ROW = {"id": "p1", "title": "Sari", "text": "mentor Boko Sari ."}


def documents_of(path: Path) -> list[Document]:
    return [document for _, document in read_corpus(path)]


def test_jsonl_gzip_and_parquet_hold_the_same_passages(tmp_path: Path) -> None:
    line = json.dumps(ROW) + "\n"
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        assert documents_of(tmp_path / name) == [Document(**ROW)]


def test_the_contents_form_of_search_r1_has_its_title_on_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 7, "contents": '"Sari"\nline one\nline two'}))
    assert documents_of(tmp_path / "a.jsonl") == [Document("7", "Sari", "line one\nline two")]


DPR = 'id\ttext\ttitle\n1\t"He said ""no"" to\tit"\tSari\n2\tplain ä text\tVela\n'


def test_the_tsv_of_dpr_has_a_header_and_quotes(tmp_path: Path) -> None:
    expected = [Document("1", "Sari", 'He said "no" to\tit'), Document("2", "Vela", "plain ä text")]
    (tmp_path / "a.tsv").write_text(DPR)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(DPR.encode()))
    assert documents_of(tmp_path / "a.tsv") == documents_of(tmp_path / "a.tsv.gz") == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"1\tx\ty\n", "line 1: the header must name `id` and `text`"),
        (b"", "line 1: the header must name"),
        (b"id\ttext\n1\tx\n\n2\tx\ty\n", "line 4: it has 3 fields, the header 2"),
        (b"id\ttext\n1\tx\n2\t\xff\n", "line 3: it is not UTF-8 at byte 2"),
        (b"id\ttext\n\tx\n", "line 2: it has no `id`"),
        (b"id\ttext\n1\t" + b"x" * 200_000 + b"\n", "line 2: field larger than field limit"),
    ],
)
def test_a_bad_line_of_a_tsv_names_its_number(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "bad.tsv").write_bytes(content)
    with pytest.raises(CorpusError, match=f"bad.tsv, {problem}"):
        documents_of(tmp_path / "bad.tsv")


def test_half_of_a_surrogate_pair_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": "1", "text": "\\ud800"}\n')
    with pytest.raises(CorpusError, match="line 1: it escapes half of a surrogate pair"):
        documents_of(tmp_path / "bad.jsonl")


def test_a_parquet_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW] * 50), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(CorpusError, match="not a Parquet file"):
        documents_of(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"id": "p2", "text": ', "not JSON"),
        (b'{"id": "p2", "text": "\xff"}', "not UTF-8"),
        (b'["p2"]', "not an object"),
        (b'{"text": "x"}', "no `id`"),
        (b'{"id": "p2"}', "neither `text` nor `contents`"),
        (b'{"id": "p2", "text": 3}', "must be strings"),
    ],
)
def test_a_bad_line_names_file_and_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(CorpusError, match=f"bad.jsonl, line 3: .*{problem}"):
        documents_of(path)


def test_a_truncated_gzip_file_is_an_error_not_a_short_corpus(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROW).encode() * 50)[:-9])
    with pytest.raises(CorpusError, match="cannot be unpacked"):
        documents_of(path)


def test_a_missing_file_and_an_unknown_kind_say_so_before_the_first_passage(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="there is no file"):
        read_corpus(tmp_path / "absent.jsonl")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(CorpusError, match=r"no \.jsonl, \.tsv"):
        read_corpus(tmp_path / "a.csv")


def test_a_duplicate_id_names_both_lines(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"c\.jsonl, line 9: id 'p1' was already used on line 2"):
        write_passages([(2, Document(**ROW)), (9, Document(**ROW))], tmp_path / "p.arrow", "c.jsonl")


def test_an_empty_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="holds no passage"):
        write_passages([], tmp_path / "p.arrow", "c.jsonl")


def test_the_store_gives_any_row_across_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval_index.corpus.ROWS_PER_BATCH", 2)
    documents = [Document(str(i), f"t{i}" if i % 2 else "", f"text {i} ä") for i in range(5)]
    assert write_passages(enumerate(documents, 1), tmp_path / "p.arrow", "c") == 5
    store = PassageStore(tmp_path / "p.arrow")
    assert [store[row] for row in (4, 0, 3)] == [documents[4], documents[0], documents[3]]
    assert store.embedding_texts(1, 4) == ["t1. text 1 ä", "text 2 ä", "t3. text 3 ä"]
    assert list(store.all_texts()) == store.embedding_texts(0, 5)
    assert store.find(["4", "5", "\ud83d", "0", "4"]) == [documents[4], None, None, documents[0], documents[4]]
    assert store.find([]) == []


def test_a_passage_without_a_title_is_embedded_as_its_text() -> None:
    assert embedding_text("", "mentor Boko Sari .") == "mentor Boko Sari ."
