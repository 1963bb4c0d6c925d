"""Rows of a file, or questions of the synthetic world, as Tasks in a seeded order with a saved position.

    source --read_tasks--> list[Task] --TaskSource--> next(n): the next n tasks, epoch after epoch

A row needs a question and an answer; every other column is optional (docs/data.md has the table). Rows of verl's
Parquet files are understood as they are.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Number
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mempo_ray.contracts.trajectory import GIVEN_TRUTH, Task
from mempo_ray.data.world import Source, is_synthetic, source_name, synthetic_tasks
from mempo_ray.errors import DataError

MAX_LISTED = 5  # different faults in one message
MAX_NUMBERS = 3  # rows of one fault in it
KEPT_COLUMNS = ("supporting_ids",)


def read_tasks(
    source: Source,
    question_key: str = "question",
    answer_key: str = "golden_answers",
    check: Callable[[Task], Task] = lambda task: task,
    kept: Sequence[str] = KEPT_COLUMNS,
) -> list[Task]:
    """All tasks of a source, in file order.

    Args:
        source: a .jsonl or .parquet file, or "synthetic:train" / "synthetic:eval" (with ?seed=…, see data/world.py); of
            several files, ids that occur in more than one get the file's name in front.
        question_key: column of the question, or `column.key` inside an object.
        answer_key: column of the gold answer(s).
        check: raises DataError for a task that nobody could score, or returns it with the golds that can be matched
            (`rewards.rows.row_check`).
        kept: columns beside ``metadata`` that travel in `Task.metadata`.

    Raises:
        DataError: no such file, or rows that cannot be tasks; names the file, and of the first few faults the rows
            (1 = first row) and the remedy.
    """
    if not isinstance(source, str):
        return _joined({name: read_tasks(name, question_key, answer_key, check, kept) for name in source})
    if is_synthetic(source):
        return synthetic_tasks(source)
    path = Path(source)
    tasks: dict[str, Task] = {}
    numbers: dict[str, int] = {}  # task id → row
    problems: dict[str, list[int]] = {}  # what is wrong → rows
    for number, raw in enumerate(_raw_rows(path), start=1):
        try:
            task = check(_task_of_row(_parsed(raw), question_key, answer_key, f"{path.stem}-{number}", kept))
            if task.task_id in tasks:
                raise DataError(f"id {task.task_id!r} is already row {numbers[task.task_id]}; ids must be different")
        except DataError as error:
            problems.setdefault(str(error), []).append(number)
            continue
        tasks[task.task_id], numbers[task.task_id] = task, number
    if problems:
        raise DataError(f"{path}, " + _listed(problems))
    if not tasks:
        raise DataError(f"{path}: no rows; give a file with at least one question")
    return list(tasks.values())


def _joined(files: Mapping[str, Sequence[Task]]) -> list[Task]:
    counts = Counter(task.task_id for tasks in files.values() for task in tasks)
    joined = [
        replace(task, task_id=f"{Path(name).stem}-{task.task_id}") if counts[task.task_id] > 1 else task
        for name, tasks in files.items()
        for task in tasks
    ]
    [(task_id, count)] = Counter(task.task_id for task in joined).most_common(1)
    if count > 1:
        raise DataError(f"{source_name(list(files))}: id {task_id!r} occurs in files of the same name; rename one")
    return joined


def _listed(problems: Mapping[str, Sequence[int]]) -> str:
    """One on the line, several below each other; rows with the same one share a line."""
    lines = [f"{_row_numbers(rows)}: {problem}" for problem, rows in problems.items()]
    if len(lines) == 1:
        return lines[0]
    num_rows, num_hidden = (sum(map(len, list(problems.values())[start:])) for start in (0, MAX_LISTED))
    more = f"\n  and {num_hidden} more rows" if num_hidden else ""
    return f"{num_rows} rows cannot be used:\n  " + "\n  ".join(lines[:MAX_LISTED]) + more


def _row_numbers(rows: Sequence[int]) -> str:
    """`row 7`, `rows 1, 2`, or `rows 1, 2, 3 and 12 more`."""
    more = f" and {len(rows) - MAX_NUMBERS} more" if len(rows) > MAX_NUMBERS else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MAX_NUMBERS]))}{more}"


class TaskSource:
    """An endless, seeded stream of tasks. Each epoch has an order of its own and holds no task twice.

    ``state()`` is all that a checkpoint needs: with the same tasks and seed, ``restore(state())`` continues exactly.
    """

    def __init__(self, tasks: Sequence[Task], seed: int = 0, shuffle: bool = True) -> None:
        if not tasks:
            raise DataError("a task source needs at least one task")
        self._tasks = tuple(tasks)
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Tasks per epoch."""
        return len(self._tasks)

    def next(self, n: int) -> list[Task]:
        """The next ``n`` tasks, all different: an epoch's last ones, if fewer than ``n``, are left out of it.

        Raises DataError where there are fewer than ``n`` tasks in all.
        """
        if n > len(self):
            raise DataError(f"data.tasks_per_step={n} is more than the {len(self)} tasks of data.train; lower it")
        if self._position + n > len(self):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        batch = self._order[self._position : self._position + n]
        self._position += n
        return [self._tasks[index] for index in batch]

    def state(self) -> dict[str, int]:
        """Where the stream stands, JSON-able: epoch, position in it, seed, and the number of tasks."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "num_tasks": len(self)}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue where ``state`` was taken. Raises DataError for the state of another seed or file length."""
        if (state["seed"], state["num_tasks"]) != (self._seed, len(self)):
            raise DataError(
                f"the saved data position is of {state['num_tasks']} tasks with seed {state['seed']}, this run has "
                f"{len(self)} with seed {self._seed}; resume with the same data.train and run.seed, or start new"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _raw_rows(path: Path) -> Iterator[dict | bytes]:
    """Rows as they come: a dict from Parquet, a line of text that is not blank from JSONL."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a .jsonl or .parquet file of questions and answers")
    if path.suffix == ".parquet":
        try:
            for batch in pq.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a Parquet file that can be read ({error}); write it again") from None
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            yield from filter(bytes.strip, lines)
    else:
        raise DataError(f"{path}: unknown kind {path.suffix!r}; use .jsonl or .parquet")


def _parsed(raw: dict | bytes) -> dict:
    if isinstance(raw, dict):
        return raw
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error.reason} at byte {error.start}); convert the file") from None
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error}); each line holds one object") from None
    if not isinstance(row, dict):
        raise DataError(f"a {type(row).__name__}, not an object; each line holds one object")
    return row


def _task_of_row(row: dict, question_key: str, answer_key: str, default_id: str, kept: Sequence[str]) -> Task:
    question = _cell(row, question_key) or _verl_question(row)
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"no question in column {question_key!r}; set data.question_key to the right column")
    answers = _cell(row, answer_key)
    metadata = _object(row, "metadata") or _object(row, "extra_info")
    if answers is None:
        answers = _object(row, "reward_model").get("ground_truth")
        if isinstance(answers, list | Mapping):
            metadata[GIVEN_TRUTH] = answers
    metadata |= {name: row[name] for name in kept if row.get(name) is not None}
    return Task(
        task_id=str(row.get("id") or metadata.get("id") or default_id),
        question=question.strip(),
        golds=_golds(answers, answer_key),
        data_source=str(row.get("data_source") or "own"),
        metadata=metadata,
    )


def _cell(row: dict, key: str) -> Any:
    """The column of that name, or `extra_info.question`: what an object in a column holds."""
    column, _, name = key.partition(".")
    return row.get(key) if key in row or not name else _object(row, column).get(name)


def _object(row: dict, column: str) -> dict:
    """A column that holds an object, or one as JSON text (as Parquet files often do); empty where it is absent."""
    value = row.get(column) or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"column {column!r} is text but not JSON ({error}); give an object") from None
    if not isinstance(value, Mapping):
        raise DataError(f"column {column!r} is a {type(value).__name__}; give an object")
    return dict(value)


def _verl_question(row: dict) -> str | None:
    """The last user message of verl's ``prompt`` column."""
    messages = row.get("prompt")
    if isinstance(messages, str):
        return messages
    if not all(isinstance(m, Mapping) for m in messages or []):
        raise DataError("column 'prompt' must hold a text, or messages with role and content")
    return next((m.get("content") for m in reversed(messages or []) if m.get("role") == "user"), None)


def _golds(answers: Any, answer_key: str) -> tuple[tuple[str, ...], ...]:
    """str, list of aliases, or list of lists (objectives × aliases), plain or under "target", Python or numpy.

    Any other object (test cases of a program) is one answer, as JSON text. Blank and missing aliases are left out.
    """
    if isinstance(answers, Mapping):
        answers = answers["target"] if "target" in answers else _json_text(answers, answer_key)
    if hasattr(answers, "tolist"):
        answers = answers.tolist()
    if not isinstance(answers, list | tuple | None):
        answers = [answers]
    if not answers:
        raise DataError(f"no answer in column {answer_key!r}; fill it in, or set data.answer_key")
    answers = [a.tolist() if hasattr(a, "tolist") else a for a in answers]
    nested = [isinstance(a, list | tuple) for a in answers]
    if any(nested) and not all(nested):
        raise DataError(
            f"{answer_key!r} mixes texts and lists: {answers}; give a list of aliases, or a list of lists (one for "
            "each objective)"
        )
    objectives = answers if all(nested) else [answers]
    aliases = [alias for objective in objectives for alias in objective]
    if strange := [a for a in aliases if not isinstance(a, str | Number | None)]:
        raise DataError(f"an answer in column {answer_key!r} is a {type(strange[0]).__name__}; give texts or numbers")
    golds = tuple(tuple(alias for a in objective if (alias := _text(a))) for objective in objectives)
    if not all(golds):
        raise DataError(f"an answer in column {answer_key!r} is empty: {answers}; fill it in or drop the row")
    return golds


def _text(answer: str | Number | None) -> str:
    """'' where it is missing: None, or NaN, as pandas writes it."""
    return "" if answer is None or answer != answer else str(answer).strip()


def _json_text(answers: Mapping, answer_key: str) -> str:
    try:
        return json.dumps(answers)
    except TypeError as error:  # bytes, dates
        raise DataError(f"the answer in column {answer_key!r} is no JSON ({error}); write it as JSON text") from None
