"""Correct memory trajectories without a teacher, from what a task's metadata says about its hops.

    Task --plan_of--> OraclePlan --oracle_trajectory (searches the real index)--> OracleTrajectory | None

Three sources of hops: the synthetic world's ``chain``, 2WikiMultihopQA's ``evidences`` and MuSiQue's
``decomposition``. A trajectory searches once per hop and writes each found fact into its memory; it is kept only where
the index really returned a passage that the hop needs, so that no memory ever says what was not read. Used by the cold
start only (and, on held-out tasks, to measure what a memory is worth).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mempo_ray.contracts.trajectory import Passage, Task
from mempo_ray.ports import Search


@dataclass(frozen=True)
class Hop:
    """One fact to look up: what to think, what to search, what to remember, and which passage proves it."""

    thought: str
    query: str
    fact: str
    is_needed: Callable[[Passage], bool]


@dataclass(frozen=True)
class OraclePlan:
    """The hops of one task, and the words for the two memories and thoughts that no hop writes."""

    hops: tuple[Hop, ...]
    nothing_known: str = "Nothing is known yet."
    enough: str = "I know enough to answer."


@dataclass(frozen=True)
class OracleTurn:
    """One turn as text; exactly one of ``query`` and ``answer`` is set. Example: see ``OracleTrajectory``."""

    memory: str
    thought: str
    query: str | None = None
    answer: str | None = None
    passages: tuple[Passage, ...] = ()
    """What the search returned, best first."""
    needed_passage_ids: tuple[str, ...] = ()
    """The returned passages that hold the hop's fact; never empty in a turn that searches."""


@dataclass(frozen=True)
class OracleTrajectory:
    """A correct episode as text: one turn per hop and one that answers. The renderer makes token rows of it.

    Example (synthetic, two hops): memories "nothing", "mentor Boko Sari .", "mentor Boko Sari . home Vela Lund .";
    queries "mentor Boko", "home Vela"; answer "Sari Lund"; facts "mentor Boko Sari .", "home Vela Lund .".
    """

    task: Task
    turns: tuple[OracleTurn, ...]
    facts: tuple[str, ...]
    """In the order of the hops; the last turn's memory is their concatenation."""

    def memory_with_foreign_fact(self, other: OracleTrajectory) -> str:
        """The last memory with its first fact replaced by the first fact of ``other``.

        The first fact is the one that only memory carries to the answer. What a scorer's P(answer | memory) loses by
        the exchange is what the fact was worth; take ``other`` from another world, so that its fact is of no use.
        """
        return " ".join((other.facts[0], *self.facts[1:]))


async def oracle_trajectory(task: Task, search: Search, top_k: int = 3) -> OracleTrajectory | None:
    """Walk the task's hops through the real index.

    Args:
        search: raises InfrastructureError on failure; it is not caught here.
        top_k: passages per search, as in the rollouts.

    Returns:
        None where the metadata describes no hops, or where a hop's passage was not among the ``top_k``.
    """
    plan = plan_of(task)
    if plan is None:
        return None
    turns: list[OracleTurn] = []
    facts: list[str] = []
    for hop in plan.hops:
        (passages,) = await search([hop.query], top_k)
        needed = tuple(p.id for p in passages if hop.is_needed(p))
        if not needed:
            return None
        memory = " ".join(facts) or plan.nothing_known
        turns.append(OracleTurn(memory, hop.thought, hop.query, None, tuple(passages), needed))
        facts.append(hop.fact)
    turns.append(OracleTurn(" ".join(facts), plan.enough, answer=task.gold_text))
    return OracleTrajectory(task, tuple(turns), tuple(facts))


async def oracle_trajectories(tasks: Sequence[Task], search: Search, top_k: int = 3) -> list[OracleTrajectory]:
    """The kept trajectories of many tasks, in the order of the tasks; searches run side by side, to be batched."""
    walked = await asyncio.gather(*(oracle_trajectory(task, search, top_k) for task in tasks))
    return [trajectory for trajectory in walked if trajectory is not None]


def plan_of(task: Task) -> OraclePlan | None:
    """The plan that the task's metadata allows; None for rows without hops (HotpotQA, own data)."""
    metadata = task.metadata
    if chain := metadata.get("chain"):
        return _world_plan(chain)
    if evidences := metadata.get("evidences"):
        return OraclePlan(tuple(_evidence_hop(e, _supporting(metadata)) for e in evidences))
    if decomposition := metadata.get("decomposition"):
        return OraclePlan(_decomposition_hops(decomposition))
    return None


def _world_plan(chain: Sequence[Sequence[str]]) -> OraclePlan:
    """Words that the tiny tokenizer knows: "need mentor Boko" -> "mentor Boko" -> "mentor Boko Sari ."."""
    hops = tuple(
        Hop(
            f"need {relation} {subject}",
            f"{relation} {subject}",
            f"{relation} {subject} {value} .",
            _has_id(passage_id),
        )
        for relation, subject, value, passage_id in chain
    )
    return OraclePlan(hops, nothing_known="nothing", enough="done")


def _evidence_hop(evidence: Sequence[str], supporting: frozenset[str]) -> Hop:
    """2Wiki: ["Jaws", "director", "Steven Spielberg"]. The rows do not say which supporting passage proves which
    evidence: it is the one about the subject, or one that mentions the value."""
    subject, relation, value = evidence

    def is_needed(passage: Passage) -> bool:
        about_subject = _fold(passage.title) == _fold(subject)
        return passage.id in supporting and (about_subject or _fold(value) in _fold(passage.text))

    return Hop(
        f"I need the {relation} of {subject}.", f"{subject} {relation}", f"{subject} {relation}: {value}.", is_needed
    )


def _decomposition_hops(decomposition: Sequence[dict]) -> tuple[Hop, ...]:
    """MuSiQue: {"question": "#1 >> producer", "answer": …, "supporting_id": …}; "#1" is the answer of hop 1."""
    answers = [str(hop["answer"]) for hop in decomposition]
    hops = []
    for hop, answer in zip(decomposition, answers, strict=True):
        asked = re.sub(r"#(\d+)", lambda match: answers[int(match[1]) - 1], hop["question"])
        query = " ".join(asked.replace(">>", " ").split()).rstrip(" ?")
        hops.append(Hop(f"I need to find: {query}.", query, f"{query}: {answer}.", _has_id(hop["supporting_id"])))
    return tuple(hops)


def _supporting(metadata) -> frozenset[str]:
    return frozenset(metadata.get("supporting_ids", ()))


def _has_id(passage_id: str) -> Callable[[Passage], bool]:
    return lambda passage: passage.id == passage_id


def _fold(text: str) -> str:
    """Letters and digits only, lower case: titles and evidences differ in quotes, hyphens and brackets."""
    return re.sub(r"\W+", " ", re.sub(r"\(.*?\)", "", text)).strip().lower()
