"""The synthetic world of the quickstart: people, places, one-line facts, and questions that need a memory.

    AtlasSpec --build_atlas--> Atlas --passages()--> Passage, one line each        (one index for all worlds)
                                     --questions()--> Question --task_of--> Task   (one split: train or eval)

An *atlas* cuts one fixed list of names into disjoint *worlds*, so that every world's passages can live in one index
without contradicting each other, and so that a held-out world shares no person, no place and no fact with a training
world. A fact is one line with the key directly before the value, "mentor Boko Sari ." (the mentor of Boko is Sari):
an induction head finds it, which is why a tiny model can learn the task at all.

A search for "mentor Boko" returns that line and two distractors that share a word with it: another fact of Boko, a
fact whose value is Boko, or somebody else's mentor. Both kinds of question ask for *two* values that no single search
returns, and the first one is gone from the context (``agent.context: last_turn``) when the answer is due:

    two hops,   3 turns:  "mentor Boko and home Vela ?"           -> mentor Boko, home Vela, answer
    three hops, 4 turns:  "mentor Boko and home of boss Vela ?"   -> mentor Boko, boss Vela, home Kim, answer

Neither a later query nor a later tool response names the first value: it reaches the answer through ``<mem>`` only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import parse_qsl

from mempo_ray.contracts.trajectory import Passage, Task
from mempo_ray.errors import DataError

PERSON_RELATIONS = ("mentor", "boss", "friend", "rival", "home", "office")
PLACE_RELATIONS = ("mayor", "judge", "baker")
TO_A_PLACE = frozenset({"home", "office"})
FACTS_PER_SUBJECT = 3
JOIN = "and"
CHAIN = "of"

NUM_PEOPLE_NAMES = 384
NUM_PLACE_NAMES = 128
BASE_SEEDS = range(1_000_000, 2_000_000)
"""Seeds of the worlds that the shipped base checkpoint was trained on. An ``AtlasSpec`` refuses them."""

Split = Literal["train", "eval"]


def _spell_names() -> tuple[str, ...]:
    """All names, in a fixed order that no seed changes: consonant-vowel-consonant-vowel, each spelt once."""
    syllables = [c + v for c in "bdfghjklmnprstvz" for v in "aeiou"]
    spelt = [(a + b).capitalize() for a in syllables for b in syllables if a != b]
    return tuple(random.Random(20251129).sample(spelt, NUM_PEOPLE_NAMES + NUM_PLACE_NAMES))


NAMES = _spell_names()
PEOPLE_NAMES = NAMES[:NUM_PEOPLE_NAMES]
PLACE_NAMES = NAMES[NUM_PEOPLE_NAMES:]


@dataclass(frozen=True)
class Fact:
    """One line of the corpus. Example: Fact("mentor", "Boko", "Sari") reads "mentor Boko Sari ."."""

    relation: str
    subject: str
    value: str

    @property
    def text(self) -> str:
        return f"{self.relation} {self.subject} {self.value} ."


@dataclass(frozen=True)
class World:
    """People, places and every fact about them; closed: each value is a subject of the same world."""

    name: str
    people: tuple[str, ...]
    places: tuple[str, ...]
    facts: tuple[Fact, ...]

    def about(self, subject: str) -> tuple[Fact, ...]:
        """The ``FACTS_PER_SUBJECT`` facts with this subject, in corpus order; empty for a stranger."""
        return tuple(f for f in self.facts if f.subject == subject)

    def passage_id(self, fact: Fact) -> str:
        return f"{self.name}:{fact.relation}:{fact.subject}"


@dataclass(frozen=True)
class Question:
    """A question of two answers. The facts of ``chain`` are looked up in order, one a turn.

    Example: chain (mentor Boko Sari, boss Vela Kim, home Kim Lund) asks "mentor Boko and home of boss Vela ?" and is
    answered "Sari Lund".
    """

    world: str
    chain: tuple[Fact, ...]

    @property
    def hops(self) -> int:
        return len(self.chain)

    @property
    def text(self) -> str:
        first, *rest = self.chain
        asked = f" {CHAIN} ".join(f.relation for f in reversed(rest))
        return f"{first.relation} {first.subject} {JOIN} {asked} {rest[0].subject} ?"

    @property
    def answer(self) -> str:
        return f"{self.chain[0].value} {self.chain[-1].value}"


def make_world(name: str, people: Sequence[str], places: Sequence[str], rng: random.Random) -> World:
    """A closed world over these names: each subject gets ``FACTS_PER_SUBJECT`` relations with random values."""
    facts = []
    for subject in (*people, *places):
        relations = PERSON_RELATIONS if subject in people else PLACE_RELATIONS
        for relation in rng.sample(relations, FACTS_PER_SUBJECT):
            values = places if relation in TO_A_PLACE else people
            facts.append(Fact(relation, subject, rng.choice([v for v in values if v != subject])))
    rng.shuffle(facts)
    return World(name, tuple(people), tuple(places), tuple(facts))


def make_question(world: World, hops: int, rng: random.Random) -> Question:
    """A random question of 2 or 3 hops whose names are all different, so that nothing can be read off by chance."""
    while True:
        chain = [rng.choice(world.facts), rng.choice(world.facts)]
        if hops == 3:
            chain.append(rng.choice(world.about(chain[1].value)))
        names = {chain[0].subject, chain[1].subject} | {f.value for f in chain}
        if len(names) == hops + 2:
            return Question(world.name, tuple(chain))


@dataclass(frozen=True)
class AtlasSpec:
    """Which worlds there are. Written after the split in a task source: "synthetic:train?seed=3&worlds=16".

    Train and eval sources of one run must name the same atlas (``same_atlas``): one index holds all its passages.
    """

    seed: int = 0
    worlds: int = 32
    """Worlds in all; the names are cut into that many equal parts."""
    held_out: int = 8
    """The last ``held_out`` worlds belong to the eval split, the others to train."""
    hops: tuple[int, ...] = (2, 3)
    """Kinds of question, drawn with equal chance."""
    tasks: int = 2048
    """Different questions per split."""

    def __post_init__(self) -> None:
        if self.seed in BASE_SEEDS:
            raise DataError(
                f"synthetic world: seed={self.seed} is one of the shipped base checkpoint's own worlds "
                f"({BASE_SEEDS.start} to {BASE_SEEDS.stop - 1}); use another seed"
            )
        if not 0 < self.held_out < self.worlds <= NUM_PLACE_NAMES // 2:
            raise DataError(
                f"synthetic world: worlds={self.worlds} and held_out={self.held_out} must satisfy "
                f"0 < held_out < worlds <= {NUM_PLACE_NAMES // 2}"
            )
        if not self.hops or not set(self.hops) <= {2, 3}:
            raise DataError(f"synthetic world: hops={self.hops} must be '2', '3' or '2,3'")


@dataclass(frozen=True)
class Atlas:
    """The worlds of one spec, train first. By construction no two of them share a name."""

    spec: AtlasSpec
    worlds: tuple[World, ...]

    def split(self, split: Split) -> tuple[World, ...]:
        border = self.spec.worlds - self.spec.held_out
        return self.worlds[:border] if split == "train" else self.worlds[border:]

    def passages(self) -> Iterator[Passage]:
        """One passage per fact of every world of both splits, without a title: the line says it all."""
        for world in self.worlds:
            for fact in world.facts:
                yield Passage(world.passage_id(fact), "", fact.text)

    def questions(self, split: Split) -> tuple[Question, ...]:
        """``spec.tasks`` different questions over the worlds of a split, the same ones for the same spec."""
        rng = random.Random(f"{self.spec.seed}/{split}")
        worlds = self.split(split)
        found: dict[str, Question] = {}
        for attempt in range(20 * self.spec.tasks):
            question = make_question(worlds[attempt % len(worlds)], rng.choice(self.spec.hops), rng)
            found.setdefault(question.text, question)
            if len(found) == self.spec.tasks:
                return tuple(found.values())
        raise DataError(
            f"synthetic world: {len(worlds)} {split} worlds hold fewer than tasks={self.spec.tasks} different "
            "questions; ask for fewer tasks"
        )


@lru_cache(maxsize=4)
def build_atlas(spec: AtlasSpec) -> Atlas:
    """All worlds of the spec. The names are shuffled by the seed and cut into equal, disjoint parts."""
    rng = random.Random(spec.seed)
    people = rng.sample(PEOPLE_NAMES, NUM_PEOPLE_NAMES)
    places = rng.sample(PLACE_NAMES, NUM_PLACE_NAMES)
    num_people, num_places = NUM_PEOPLE_NAMES // spec.worlds, NUM_PLACE_NAMES // spec.worlds
    worlds = tuple(
        make_world(
            f"s{spec.seed}w{index}",
            people[index * num_people : (index + 1) * num_people],
            places[index * num_places : (index + 1) * num_places],
            rng,
        )
        for index in range(spec.worlds)
    )
    names = [name for world in worlds for name in (*world.people, *world.places)]
    assert len(names) == len(set(names)), "two worlds share a name"
    return Atlas(spec, worlds)


Source = str | Sequence[str]
"""What `data.train` and `data.eval` name: one file or synthetic source, or several files."""


def source_name(source: Source) -> str:
    """A task source as messages name it."""
    return source if isinstance(source, str) else ", ".join(source)


def is_synthetic(source: Source) -> bool:
    """Whether a task source names the synthetic world rather than files."""
    name = source_name(source)
    return name == "synthetic" or name.startswith("synthetic:")


def parse_source(source: str) -> tuple[Split, AtlasSpec]:
    """Split and atlas of a task source, e.g. "synthetic:eval?seed=1&hops=2&tasks=400"; errors name the source."""
    head, _, query = source.partition("?")
    split = head.removeprefix("synthetic:")
    if split not in ("train", "eval"):
        raise DataError(f"{source!r}: write synthetic:train or synthetic:eval, then ?seed=…&worlds=…&tasks=…")
    given = dict(parse_qsl(query, keep_blank_values=True))
    known = AtlasSpec.__dataclass_fields__
    if unknown := sorted(set(given) - set(known)):
        raise DataError(f"{source!r}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    try:
        values: dict[str, Any] = {
            key: tuple(map(int, v.split(","))) if key == "hops" else int(v) for key, v in given.items()
        }
    except ValueError:
        raise DataError(f"{source!r}: every value is a whole number (hops: numbers joined by commas)") from None
    return split, AtlasSpec(**values)


def same_atlas(*sources: Source) -> Atlas:
    """The one atlas that all these synthetic sources mean: what the index of the run must hold.

    Raises DataError where they differ in anything but ``tasks`` and ``hops``, which change no fact.
    """
    names = [source_name(source) for source in sources]
    specs = [parse_source(name)[1] for name in names]
    if len({(spec.seed, spec.worlds, spec.held_out) for spec in specs}) != 1:
        raise DataError(f"{' and '.join(names)} name different worlds; give both the same seed, worlds and held_out")
    return build_atlas(specs[0])


def task_of(question: Question, task_id: str) -> Task:
    """The question as a Task; the oracle reads ``metadata["chain"]``: [relation, subject, value, passage id] by hop."""
    chain = [[f.relation, f.subject, f.value, f"{question.world}:{f.relation}:{f.subject}"] for f in question.chain]
    return Task(
        task_id=task_id,
        question=question.text,
        golds=((question.answer,),),
        data_source="synthetic",
        metadata={"world": question.world, "hops": question.hops, "chain": chain},
    )


def synthetic_tasks(source: str) -> list[Task]:
    """All tasks of a synthetic source, in a fixed order."""
    split, spec = parse_source(source)
    questions = build_atlas(spec).questions(split)
    return [task_of(q, f"synthetic-{split}-s{spec.seed}-{index:05d}") for index, q in enumerate(questions)]
