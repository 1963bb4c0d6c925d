"""Recall of an index on questions whose supporting passages are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrieval_index.corpus import read_rows
from retrieval_index.errors import CorpusError
from retrieval_index.retriever import Retriever

QUERIES_PER_BATCH = 256


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the ids of the passages that answer it (at least one)."""

    text: str
    supporting_ids: tuple[str, ...]


def read_questions(path: str | Path) -> list[Question]:
    """The rows of a JSONL, TSV or Parquet file with `question` and `supporting_ids`; rows without gold are left out.

    Raises:
        CorpusError: a row lacks one of the two, or no row has gold passages.
    """
    questions = []
    for number, row in read_rows(Path(path)):
        if not isinstance(row.get("question"), str) or not isinstance(row.get("supporting_ids"), list):
            raise CorpusError(
                f"{path}, line {number}: it needs `question` (a string) and `supporting_ids` (a list)",
                "questions",
                "mend or remove that line",
            )
        if row["supporting_ids"]:
            questions.append(Question(row["question"], tuple(map(str, row["supporting_ids"]))))
    if not questions:
        raise CorpusError(f"{path} has no question with supporting ids", "questions", "give another file")
    return questions


def recall(found: Sequence[Sequence[str]], questions: Sequence[Question], top_k: int) -> float:
    """recall@k: mean over questions of the share of supporting ids among the first k found."""
    shares = [
        len(set(ids[:top_k]) & set(question.supporting_ids)) / len(question.supporting_ids)
        for ids, question in zip(found, questions, strict=True)
    ]
    return float(np.mean(shares))


def all_found(found: Sequence[Sequence[str]], questions: Sequence[Question], top_k: int) -> float:
    """all@k: share of questions with every supporting id among the first k found."""
    pairs = zip(found, questions, strict=True)
    return float(np.mean([set(question.supporting_ids) <= set(ids[:top_k]) for ids, question in pairs]))


def evaluate(retriever: Retriever, questions: Sequence[Question]) -> dict[str, float]:
    """`recall@3`, `recall@5`, `all@3` and `questions` (how many)."""
    found: list[list[str]] = []
    for start in range(0, len(questions), QUERIES_PER_BATCH):
        texts = [question.text for question in questions[start : start + QUERIES_PER_BATCH]]
        hits = retriever.find(texts, 5)
        for rows, scores in zip(hits.rows, hits.scores, strict=True):
            found.append([passage.id for passage in retriever.passages(rows, scores)])
    return {
        "recall@3": recall(found, questions, 3),
        "recall@5": recall(found, questions, 5),
        "all@3": all_found(found, questions, 3),
        "questions": len(questions),
    }
