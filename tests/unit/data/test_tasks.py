import dataclasses
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempo_ray.contracts.trajectory import Task
from mempo_ray.data import tasks
from mempo_ray.data.tasks import TaskSource, read_tasks
from mempo_ray.errors import DataError


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def one_gold(tmp_path, answer):
    return read_tasks(write_jsonl(tmp_path / "t.jsonl", [{"question": "q", "golden_answers": answer}]))[0].golds


def numbered(n):
    return [Task(f"t{i}", "q", (("a",),), "own") for i in range(n)]


# --- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "golds"),
    [
        ("Paris", (("Paris",),)),
        (["Paris", "Paris, France"], (("Paris", "Paris, France"),)),
        ([["Paris"], ["1789", "in 1789"]], (("Paris",), ("1789", "in 1789"))),
        ({"target": "Paris"}, (("Paris",),)),
        ({"target": [["Paris"], ["1789"]]}, (("Paris",), ("1789",))),
        (1789, (("1789",),)),
        (["", "Paris", " "], (("Paris",),)),
        ({"inputs": ["1"], "outputs": ["2"]}, (('{"inputs": ["1"], "outputs": ["2"]}',),)),
    ],
)
def test_answers_may_be_text_aliases_or_objectives(tmp_path, answer, golds):
    assert one_gold(tmp_path, answer) == golds


def test_a_question_and_an_answer_column_of_any_name_are_enough(tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [{"frage": "Wo?", "antwort": "Ulm"}])
    assert read_tasks(path, "frage", "antwort") == [Task("mine-1", "Wo?", (("Ulm",),), "own", {})]


def test_a_column_may_lie_inside_an_object(tmp_path):
    prompt = [{"role": "user", "content": "Use <search>. Who?"}]
    row = {"prompt": prompt, "extra_info": {"question": "Who?", "a": "Ann"}}
    path = write_jsonl(tmp_path / "t.jsonl", [row])
    (task,) = read_tasks(path, "extra_info.question", "extra_info.a")
    assert (task.question, task.golds) == ("Who?", (("Ann",),))


def test_parquet_rows_of_verl_are_read_as_they_are(tmp_path):
    row = {
        "data_source": "nq",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Who?"}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "Anna"]}},
        "extra_info": {"index": 4, "split": "train"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "verl.parquet")
    (task,) = read_tasks(str(tmp_path / "verl.parquet"))
    metadata = {"index": 4, "split": "train", "reward_model.ground_truth": {"target": ["Ann", "Anna"]}}
    assert task == Task("verl-1", "Who?", (("Ann", "Anna"),), "nq", metadata)


def test_supporting_ids_travel_in_the_metadata_for_the_oracle(tmp_path):
    row = {"id": "x", "question": "q", "golden_answers": ["a b"], "supporting_ids": ["p1"], "metadata": {"hops": 2}}
    (task,) = read_tasks(write_jsonl(tmp_path / "t.jsonl", [row]))
    assert task.metadata == {"hops": 2, "supporting_ids": ["p1"]}


def test_metadata_as_json_text_is_an_object(tmp_path):
    row = {"question": "q", "golden_answers": ["a b"], "metadata": json.dumps({"hops": 2})}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    (task,) = read_tasks(str(tmp_path / "t.parquet"))
    assert task.metadata == {"hops": 2}


def test_a_parquet_file_that_was_cut_says_so(tmp_path):
    pq.write_table(pa.table({"question": ["q"], "golden_answers": ["a"]}), tmp_path / "t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[: len(whole) // 2] + whole[-200:])
    with pytest.raises(DataError, match="not a Parquet file"):
        read_tasks(str(tmp_path / "t.parquet"))


@pytest.mark.parametrize(
    ("answer", "golds"),
    [
        (np.str_("Ann"), (("Ann",),)),
        (np.array(["Ann", "Anna"], dtype=object), (("Ann", "Anna"),)),
        (np.array([np.array(["Ann"]), np.array(["Bob", "Rob"])], dtype=object), (("Ann",), ("Bob", "Rob"))),
        (np.int64(4), (("4",),)),
        (["Ann", None, float("nan")], (("Ann",),)),
        (Decimal("1.50"), (("1.50",),)),
    ],
)
def test_numpy_answers_are_answers_plain_or_under_target(answer, golds):
    assert tasks._golds(answer, "a") == golds
    assert tasks._golds({"target": answer}, "a") == golds


@pytest.mark.parametrize("answer", [b"Ann", {"inputs": b"1"}, [["Ann"], [b"Bob"]]])
def test_bytes_are_no_answer(answer):
    with pytest.raises(DataError, match="bytes"):
        tasks._golds(answer, "a")


def check_that_refuses_x(task):
    if task.golds == (("x",),):
        raise DataError("x is no answer")
    return dataclasses.replace(task, golds=(("seen",),))


def check_that_names_its_task(task):
    raise DataError(f"{task.gold_text} is no answer")


def test_a_check_sees_every_task_and_may_change_its_golds(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [{"question": "q", "golden_answers": "y"}])
    assert read_tasks(path, check=check_that_refuses_x)[0].golds == (("seen",),)


def test_all_bad_rows_are_reported_at_once_those_with_the_same_fault_on_one_line(tmp_path):
    rows = [{"question": "q", "golden_answers": "x"}, {"question": "q", "golden_answers": "y"}, {"golden_answers": "y"}]
    path = write_jsonl(tmp_path / "t.jsonl", [*rows * 4, rows[2]])
    with pytest.raises(DataError) as caught:
        read_tasks(path, check=check_that_refuses_x)
    head, first, second = str(caught.value).splitlines()
    assert head == f"{path}, 9 rows cannot be used:"
    assert first.strip() == "rows 1, 4, 7 and 1 more: x is no answer"
    assert second.strip().startswith("rows 3, 6, 9 and 2 more: no question")


def test_several_files_are_one_source_whose_ids_stay_different(tmp_path):
    rows = [{"id": name, "question": "q", "golden_answers": "x"} for name in ("1", "2")]
    files = [write_jsonl(tmp_path / "a.jsonl", rows), write_jsonl(tmp_path / "b.jsonl", rows[1:])]
    assert [task.task_id for task in read_tasks(files)] == ["1", "a-2", "b-2"]


def test_files_of_one_name_in_two_folders_must_not_share_ids(tmp_path):
    files = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        files.append(write_jsonl(tmp_path / folder / "t.jsonl", [{"question": "q", "golden_answers": "x"}]))
    with pytest.raises(DataError, match=r"x/t\.jsonl, .*y/t\.jsonl: id 't-t-1' occurs in files of the same name"):
        read_tasks(files)


def test_one_fault_of_all_rows_is_one_line(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [{"question": "q", "golden_answers": "x"}] * 2)
    with pytest.raises(DataError, match=r"t\.jsonl, rows 1, 2: x is no answer$"):
        read_tasks(path, check=check_that_refuses_x)


def test_of_many_different_faults_the_first_five_are_told(tmp_path):
    path = write_jsonl(
        tmp_path / "t.jsonl", [{"question": "q", "golden_answers": f"{n}"} for n in range(7) for _ in "ab"]
    )
    with pytest.raises(DataError) as caught:
        read_tasks(path, check=check_that_names_its_task)
    head, *faults, rest = str(caught.value).splitlines()
    assert head.endswith("14 rows cannot be used:")
    assert [fault.partition(":")[0].strip() for fault in faults] == [f"rows {n}, {n + 1}" for n in range(1, 11, 2)]
    assert rest.strip() == "and 4 more rows"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, r"row 2: no answer in column 'golden_answers'.*data\.answer_key"),
        ({"question": "q", "golden_answers": []}, "row 2: no answer"),
        ({"golden_answers": "a b"}, r"row 2: no question in column 'question'.*data\.question_key"),
        ({"question": "q", "golden_answers": ["", " "]}, "row 2: an answer in column 'golden_answers' is empty"),
        ({"question": "q", "golden_answers": [["x"], [""]]}, "row 2: an answer in column 'golden_answers' is empty"),
        ({"question": "q", "golden_answers": [["x"], "y"]}, "row 2: 'golden_answers' mixes texts and lists"),
        ({"question": "q", "golden_answers": ["x", ["y"]]}, "row 2: 'golden_answers' mixes texts and lists"),
        ({"question": "q", "golden_answers": ["x", {"y": 1}]}, "row 2: an answer in column 'golden_answers' is a dict"),
        ({"question": "q", "golden_answers": [[["x"]]]}, "row 2: an answer in column 'golden_answers' is a list"),
        ({"question": "q", "golden_answers": [None]}, "row 2: an answer in column 'golden_answers' is empty"),
        ({"prompt": ["q"], "golden_answers": "x"}, "row 2: column 'prompt' must hold a text, or messages"),
        ({"prompt": [{"role": "user"}], "golden_answers": "x"}, "row 2: no question"),
        ({"question": "q", "golden_answers": "x", "metadata": "{"}, "row 2: column 'metadata' is text but not JSON"),
        ({"question": "q", "golden_answers": "x", "metadata": [1]}, "row 2: column 'metadata' is a list"),
        ({"question": "q", "reward_model": "x"}, "row 2: column 'reward_model' is text but not JSON"),
        ({"question": "q", "golden_answers": "x", "id": "first"}, "row 2: id 'first' is already row 1"),
    ],
)
def test_a_bad_row_is_refused_with_its_number_and_the_remedy(tmp_path, row, message):
    path = write_jsonl(tmp_path / "t.jsonl", [{"id": "first", "question": "q", "golden_answers": "x"}, row])
    with pytest.raises(DataError, match=message):
        read_tasks(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.jsonl", None, r"no such file; give a \.jsonl"),
        ("t.csv", "q,a", "use .jsonl or .parquet"),
        ("t.jsonl", '{"question": ', "row 1: not JSON"),
        ("t.jsonl", "[1]", "row 1: a list, not an object"),
        ("t.jsonl", "", "no rows"),
        ("t.jsonl", '{"question": "Zürich?"}'.encode("latin-1"), r"row 1: not UTF-8 .* at byte 15\); convert"),
        ("t.parquet", "PAR1 and no more", "not a Parquet file that can be read"),
    ],
)
def test_a_file_that_is_no_task_file_says_why(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        read_tasks(str(tmp_path / name))


# --- order -----------------------------------------------------------------------------------------------------


def test_each_epoch_holds_every_task_once_in_another_order():
    source = TaskSource(numbered(20), seed=1)
    first, second = ([t.task_id for t in source.next(20)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(t.task_id for t in numbered(20))
    assert first != second


def test_without_shuffle_the_order_is_the_file_s_and_a_step_never_crosses_an_epoch():
    source = TaskSource(numbered(5), shuffle=False)
    assert [[t.task_id for t in source.next(2)] for _ in range(3)] == [["t0", "t1"], ["t2", "t3"], ["t0", "t1"]]


def test_a_step_of_more_tasks_than_there_are_is_refused():
    with pytest.raises(DataError, match=r"data\.tasks_per_step=8 is more than the 7 tasks"):
        TaskSource(numbered(7)).next(8)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_restored_source_goes_on_as_if_never_stopped(steps):
    stopped, whole = (TaskSource(numbered(7), seed=2) for _ in range(2))
    for _ in range(steps):
        stopped.next(3)
    state = json.loads(json.dumps(stopped.state()))
    resumed = TaskSource(numbered(7), seed=2)
    resumed.restore(state)
    for _ in range(steps):
        whole.next(3)
    assert [resumed.next(3) for _ in range(3)] == [whole.next(3) for _ in range(3)]


def test_a_position_of_another_file_or_seed_is_refused():
    state = TaskSource(numbered(7), seed=2).state()
    with pytest.raises(DataError, match="7 tasks with seed 2"):
        TaskSource(numbered(7), seed=3).restore(state)
