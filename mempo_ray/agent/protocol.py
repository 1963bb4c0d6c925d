"""What a turn's text means: blocks, token spans, the action, and the format verdict (algorithm.md §1 and §2).

Everything works on the *bytes* of the policy's own tokens. Tool text never comes here, so a retrieved passage may
hold any tag, or the word "assistant", without counting for or against the policy.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mempo_ray.contracts import NO_SPAN, SPAN_NAMES

SEARCH_TAGS = ("search",)
"""Tags that ask for a tool, unless a run's tools say otherwise (agent/tools/parsers.py)."""

FORMAT_CHECKS = (
    "think_paired",
    "think_present",
    "answer_paired",
    "answer_present",
    "search_paired",
    "search_present",
    "mem_paired",
    "mem_opens_each_turn",
    "think_follows_mem",
    "search_answered",
    "answer_in_order",
)
"""The 8 rules of §2 as 11 checks, in its order."""


@dataclass(frozen=True)
class Block:
    """`<name>…</name>` at bytes [start, stop) of the turn, tags included."""

    name: str
    start: int
    stop: int
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", errors="replace").strip()


@dataclass(frozen=True)
class ParsedTurn:
    """One turn, parsed.

    `blocks`: outermost blocks in order; tags inside a block are its content. `tags`: every tag, as (name, is_closing).
    `starts_T`: the byte at which each token begins. `call_tags`: the tags that ask for a tool. Whichever it is, spans
    and format rules call it "search".

    Example: tokens ["<mem>", "a</mem", "><", "answer>", "b</answer>"] have blocks mem = bytes [0, 12) and
    answer = bytes [12, 30); the token "><" begins inside mem, so the spans are mem [0, 3) and answer [3, 5).
    """

    text: bytes
    blocks: tuple[Block, ...]
    tags: tuple[tuple[str, bool], ...]
    starts_T: tuple[int, ...]
    call_tags: tuple[str, ...] = SEARCH_TAGS

    @property
    def actions(self) -> list[Block]:
        """Calls and answers, in order."""
        return [block for block in self.blocks if block.name == "answer" or block.name in self.call_tags]

    @property
    def action(self) -> Block | None:
        """The first call or answer. A call for nothing is no action: it must not reach the tool, whose failure
        would take the trajectory out of the statistics."""
        action = next(iter(self.actions), None)
        return None if action is None or (action.name != "answer" and not action.text) else action

    def block(self, name: str) -> Block | None:
        """The block of that name, if it is whole and the only one."""
        found = [block for block in self.blocks if block.name in self.tags_of(name)]
        return found[0] if len(found) == 1 and self.is_paired(name) else None

    def is_paired(self, name: str) -> bool:
        """Opening and closing tags of that name alternate, wherever they stand."""
        return all(map(self._alternates, self.tags_of(name)))

    def tags_of(self, name: str) -> tuple[str, ...]:
        """ "search" stands for every tag that asks for a tool."""
        return self.call_tags if name == "search" else (name,)

    def _alternates(self, tag: str) -> bool:
        closings = [is_closing for name, is_closing in self.tags if name == tag]
        return len(closings) % 2 == 0 and all(closing == bool(n % 2) for n, closing in enumerate(closings))

    def token_span(self, block: Block) -> tuple[int, int]:
        """The half-open range of tokens whose first byte lies in the block."""
        return bisect_left(self.starts_T, block.start), bisect_left(self.starts_T, block.stop)

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Token range by name; NO_SPAN for a block that is missing, truncated or repeated."""
        blocks = {name: self.block(name) for name in SPAN_NAMES}
        return {name: self.token_span(block) if block else NO_SPAN for name, block in blocks.items()}


def write_turn(memory: str, thought: str, *, search: str | None = None, answer: str | None = None) -> str:
    """The canonical text of a turn with exactly one action; what the cold start teaches."""
    action = f"<search>{search}</search>" if answer is None else f"<answer>{answer}</answer>"
    return f"<mem>{memory}</mem><think>{thought}</think>{action}"


def parse_turn(pieces_T: Sequence[bytes], call_tags: tuple[str, ...] = SEARCH_TAGS) -> ParsedTurn:
    """Parse one output from the bytes of its tokens (`Tokenizer.token_bytes` of each id)."""
    text = b"".join(pieces_T)
    starts = tuple(accumulate(map(len, pieces_T), initial=0))[:-1]
    tags = list(_tag_pattern(call_tags).finditer(text))
    blocks: list[Block] = []
    end = 0
    for tag in tags:
        name = tag[2].decode()
        if tag[1] or tag.start() < end:  # a closing tag opens nothing; a tag inside a block is content
            continue
        close = text.find(f"</{name}>".encode(), tag.end())
        if close >= 0:
            end = close + len(f"</{name}>")
            blocks.append(Block(name, tag.start(), end, text[tag.end() : close]))
    return ParsedTurn(text, tuple(blocks), tuple((t[2].decode(), bool(t[1])) for t in tags), starts, call_tags)


@functools.cache
def _tag_pattern(call_tags: tuple[str, ...]) -> re.Pattern[bytes]:
    names = (*(name for name in SPAN_NAMES if name != "search"), *call_tags)
    return re.compile(rb"<(/?)(" + "|".join(map(re.escape, names)).encode() + rb")>")


def format_report(turns_S: Sequence[ParsedTurn], responded_S: Sequence[bool]) -> Mapping[str, bool]:
    """The verdict by check, in the order of FORMAT_CHECKS. `responded_S[t]`: turn t was followed by a tool response.

    A turn takes one action; whatever it asks for after that fails the check of the action that counted.
    """
    tags = [tag for turn in turns_S for tag in turn.tags]
    actions_S = [["answer" if block.name == "answer" else "search" for block in turn.actions] for turn in turns_S]

    def paired(name: str) -> bool:
        return all(turn.is_paired(name) for turn in turns_S)

    def present(name: str) -> bool:
        names = {tag for turn in turns_S for tag in turn.tags_of(name)}
        return any({(tag, False), (tag, True)} <= set(tags) for tag in names)

    closes_first = next((is_closing for name, is_closing in tags if name == "answer"), False)
    verdict_N = (
        paired("think"),
        present("think"),
        paired("answer"),
        present("answer"),
        paired("search"),
        present("search"),
        paired("mem"),
        bool(turns_S) and all(map(_opens_with_one_mem, turns_S)),
        bool(turns_S) and all(map(_think_comes_second, turns_S)),
        all(
            responded and actions == ["search"]
            for actions, responded in zip(actions_S, responded_S, strict=True)
            if actions[:1] == ["search"]
        ),
        not closes_first and all(actions == ["answer"] for actions in actions_S if actions[:1] == ["answer"]),
    )
    return dict(zip(FORMAT_CHECKS, verdict_N, strict=True))


def extract_answer(turns_S: Sequence[ParsedTurn]) -> str | None:
    """Content of the last `<answer>` of the policy's own tokens, stripped; None without one."""
    answers = [block.text for turn in turns_S for block in turn.blocks if block.name == "answer"]
    return answers[-1] if answers else None


def _opens_with_one_mem(turn: ParsedTurn) -> bool:
    mems = [block for block in turn.blocks if block.name == "mem"]
    return len(mems) == 1 and not turn.text[: mems[0].start].strip()


def _think_comes_second(turn: ParsedTurn) -> bool:
    return [block.name for block in turn.blocks[:2]] == ["mem", "think"]
