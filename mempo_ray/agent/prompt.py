"""Prompts from stored ids: one renderer for rollouts and for the rows of the cold start.

    model folder ──ChatFrame.from_folder──▶ ChatFrame ──Renderer──▶ initial_ids, tool_ids, sft_rows
                                                                    next_prompt (ids in, ids out)

Layout of an episode: `initial_ids` ++ output_1 ++ tool_1 ++ output_2 ++ tool_2 … where an output ends with the
end-of-turn token, and a tool part runs from after that token to and including the next assistant header. Every part
is encoded once; prompts only concatenate (algorithm.md §1, "token in, token out").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mempo_ray.agent.memory import memory_ids
from mempo_ray.agent.protocol import parse_turn
from mempo_ray.agent.tokenizer import read_json, token_text
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import Passage
from mempo_ray.errors import ConfigError
from mempo_ray.ports import Tokenizer

_SYSTEM, _QUESTION, _OUTPUT, _TOOL = (f"MEMPO-{name}-SENTINEL" for name in ("SYSTEM", "QUESTION", "OUTPUT", "TOOL"))
_TEMPLATE_DATE = "26 Jul 2024"  # Llama 3's own fallback; today's date would make prompts differ between two days


@dataclass(frozen=True)
class ChatFrame:
    """The fixed text around messages, cut out of a chat template.

    Example (ChatML):
        before_question  "<|im_start|>user\\n"      (with the template's default system message, if it has one)
        before_output    "<|im_end|>\\n<|im_start|>assistant\\n"
        after_output     "<|im_end|>\\n<|im_start|>user\\n"
        system           ("<|im_start|>system\\n", "<|im_end|>\\n<|im_start|>user\\n"), None: the template refuses one
    """

    before_question: str
    before_output: str
    after_output: str
    system: tuple[str, str] | None

    @classmethod
    def from_folder(cls, folder: Path | str, template: str = "auto", tools: Sequence[Mapping[str, Any]] = ()) -> Self:
        """`template`: 'auto' = `chat_template.jinja` of the folder, else `chat_template` of its tokenizer_config.json;
        or the path of a jinja file. `tools`: function schemas that the template lists in the first prompt.

        Raises:
            ConfigError: no template, or one that fails, repeats or drops the messages.
        """
        folder = Path(folder)
        special = read_json(folder / "tokenizer_config.json")
        source = _template_source(folder, special, template)
        tokens = {name: token_text(special.get(name)) for name in ("bos_token", "eos_token")}
        return cls.from_template(source, tokens, tools)

    @classmethod
    def from_template(cls, source: str, tokens: Mapping[str, str], tools: Sequence[Mapping[str, Any]] = ()) -> Self:
        """Cut the frame out of jinja text. `tokens` are the template's variables bos_token and eos_token."""
        render = _renderer_of(source, tokens, tools)
        dialogue = [("user", _QUESTION), ("assistant", _OUTPUT), ("user", _TOOL)]
        try:
            before_question, before_output = _cut(render(dialogue[:1]), _QUESTION)
            _, _, after_output, before_next = _cut(render(dialogue), _QUESTION, _OUTPUT, _TOOL)
        except TemplateError as error:
            raise ConfigError(f"agent.chat_template: the template failed on a plain dialogue: {error}") from error
        if before_next != before_output:
            raise ConfigError(
                "agent.chat_template: the template opens a second answer with other text than the first "
                f"({before_next!r}, {before_output!r}); give a template without that difference"
            )
        try:
            before_system, between, _ = _cut(render([("system", _SYSTEM), *dialogue[:1]]), _SYSTEM, _QUESTION)
        except (TemplateError, ConfigError):  # Gemma's template refuses a system message; only a use of it is an error
            return cls(before_question, before_output, after_output, None)
        return cls(before_question, before_output, after_output, (before_system, between))

    def opening(self, question: str, system_prompt: str) -> str:
        """Text of the first prompt, assistant header included. Raises ConfigError: no room for a system message."""
        if not system_prompt:
            return self.before_question + question + self.before_output
        if self.system is None:
            raise ConfigError("agent.system_prompt: the model's chat template has no system message; leave it empty")
        return self.system[0] + system_prompt + self.system[1] + question + self.before_output


class ToolResponse(NamedTuple):
    """`ids`: int32 [Q], frame included. `text`: the `<tool_response>` alone. `passage_ids`: the passages in it."""

    ids: np.ndarray
    text: str
    passage_ids: tuple[str, ...]


class SftRow(NamedTuple):
    """One supervised turn: int32 prompt as a rollout would have it, int32 output with its end-of-turn token."""

    prompt_ids: np.ndarray
    output_ids: np.ndarray


class PastTurn(NamedTuple):
    """What later prompts may show of a turn (int32 ids)."""

    output_ids: np.ndarray
    tool_ids: np.ndarray
    memory_ids: np.ndarray


class Renderer:
    """Texts to ids for everything that the system, not the policy, writes.

    Raises:
        ConfigError: the tokenizer's end-of-turn token is not the one by which the template ends an assistant's message.
    """

    def __init__(self, tokenizer: Tokenizer, frame: ChatFrame, system_prompt: str = "") -> None:
        end_of_turn = tokenizer.token_bytes(tokenizer.end_of_turn_id).decode()
        if not end_of_turn or not frame.after_output.startswith(end_of_turn):
            raise ConfigError(
                f"agent.chat_template: an assistant's message ends with {frame.after_output[:20]!r}…, but eos_token of "
                f"tokenizer_config.json is {end_of_turn!r}; make it the token that ends a turn"
            )
        self.tokenizer = tokenizer
        self._frame = frame
        self._system_prompt = system_prompt
        self._before_tool = frame.after_output.removeprefix(end_of_turn)

    @classmethod
    def from_folder(
        cls, folder: Path | str, tokenizer: Tokenizer, agent: Agent, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Self:
        return cls(tokenizer, ChatFrame.from_folder(folder, agent.chat_template, tools), agent.system_prompt)

    def initial_ids(self, question: str) -> np.ndarray:
        """int32 [P]: the prompt of turn 1."""
        return self._encode(self._frame.opening(question, self._system_prompt))

    def output_ids(self, text: str) -> np.ndarray:
        """int32 [O]: a turn that the policy did not sample (cold start), with its end-of-turn token."""
        return np.append(self._encode(text), np.int32(self.tokenizer.end_of_turn_id))

    def tool_ids(self, passages: Sequence[Passage], limit_tokens: int) -> ToolResponse:
        """A search result, one passage a line; cut at a passage border, and marked, when its ids exceed the limit."""
        whole = self._tool_response(passages, len(passages))
        if len(whole.ids) <= limit_tokens:
            return whole
        num_kept = bisect_right(
            range(1, len(passages)), limit_tokens, key=lambda n: len(self._tool_response(passages, n).ids)
        )
        return self._tool_response(passages, num_kept)

    def sft_rows(self, initial_ids: np.ndarray, turns: Sequence[tuple[str, np.ndarray]], agent: Agent) -> list[SftRow]:
        """One row per turn of a written episode: (output text without the end token, ids of its tool response)."""
        rows: list[SftRow] = []
        history: list[PastTurn] = []
        for text, tool_ids in turns:
            output_ids = self.output_ids(text)
            rows.append(SftRow(self.next_prompt(initial_ids, history, agent), output_ids))
            history.append(PastTurn(output_ids, tool_ids, self.memory_ids(output_ids)))
        return rows

    def memory_ids(self, output_ids: np.ndarray) -> np.ndarray:
        """int32 [M]: the `<mem>` block of an output; empty where it has not exactly one."""
        turn = parse_turn([self.tokenizer.token_bytes(i) for i in output_ids])
        return memory_ids(output_ids, turn, self.tokenizer)[0]

    def next_prompt(self, initial_ids: np.ndarray, history: Sequence[PastTurn], agent: Agent) -> np.ndarray:
        """`next_prompt` under the agent's context settings."""
        return next_prompt(
            initial_ids,
            history,
            context=agent.context,
            k_turns=agent.k_turns,
            end_of_turn_id=self.tokenizer.end_of_turn_id,
        )

    def _tool_response(self, passages: Sequence[Passage], num_kept: int) -> ToolResponse:
        lines = [f"{p.title}: {p.text}" if p.title else p.text for p in passages[:num_kept]]
        if num_kept < len(passages):
            lines.append(f"[{num_kept} of {len(passages)} passages shown]")
        text = "<tool_response>" + "\n".join(lines) + "</tool_response>"
        ids = self._encode(self._before_tool + text + self._frame.before_output)
        return ToolResponse(ids, text, tuple(p.id for p in passages[:num_kept] if p.id))

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text), np.int32)


def next_prompt(
    initial_ids: np.ndarray, history: Sequence[PastTurn], *, context: str, k_turns: int, end_of_turn_id: int
) -> np.ndarray:
    """int32 [P]: the prompt of the turn after `history`, by concatenation alone.

    Args:
        context: last_turn (the default of the paper) | full | k_turns | memory_only. Under memory_only the prompt
            holds the last `<mem>` block closed with the end-of-turn token, and the last tool response.
    """
    if not history:
        return initial_ids
    if context == "memory_only":
        last = history[-1]
        return np.concatenate([initial_ids, last.memory_ids, np.array([end_of_turn_id], np.int32), last.tool_ids])
    num_shown = {"last_turn": 1, "full": len(history), "k_turns": k_turns}[context]
    shown = [ids for turn in history[-num_shown:] for ids in (turn.output_ids, turn.tool_ids)]
    return np.concatenate([initial_ids, *shown])


def _template_source(folder: Path, special: Mapping, template: str) -> str:
    if template != "auto":
        if not Path(template).is_file():
            raise ConfigError(f"agent.chat_template: no such file: {template}; give a jinja file or 'auto'")
        return Path(template).read_text(encoding="utf-8")
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    found = special.get("chat_template")
    if isinstance(found, list):  # several named templates
        found = next((entry["template"] for entry in found if entry["name"] == "default"), None)
    if not found:
        raise ConfigError(f"policy.model: {folder} has no chat template; set agent.chat_template to a jinja file")
    return found


def _renderer_of(
    source: str, tokens: Mapping[str, str], tools: Sequence[Mapping[str, Any]]
) -> Callable[[Sequence[tuple[str, str]]], str]:
    """The template as a function of (role, content) messages, ending with the assistant header."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    functions = {"raise_exception": raise_exception, "strftime_now": lambda _format: _TEMPLATE_DATE}
    compiled = environment.from_string(source, globals=functions)

    def render(messages: Sequence[tuple[str, str]]) -> str:
        plain = [{"role": role, "content": content} for role, content in messages]
        return compiled.render(messages=plain, add_generation_prompt=True, tools=list(tools) or None, **tokens)

    return render


def _cut(text: str, *sentinels: str) -> list[str]:
    """The pieces of `text` around the sentinels. Raises ConfigError unless each stands in it once, in order."""
    pieces = []
    for sentinel in sentinels:
        before, found, text = text.partition(sentinel)
        if not found or sentinel in text:
            raise ConfigError(
                f"agent.chat_template: the template shows {sentinel!r} {'twice' if found else 'nowhere'}; "
                "every message must appear once and in order"
            )
        pieces.append(before)
    return [*pieces, text]
