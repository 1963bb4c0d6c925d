"""One MemPO episode (algorithm.md §1).

    stage     consumes                        produces             waits for     on failure
    prompt    stored ids of earlier turns     prompt ids           –             –
    generate  prompt ids, the turn's seed     ids, log-probs       an engine     engine_failed | deadline
    parse     bytes of the output             blocks, action       –             the policy's: length | format_stop
    call      action                          passages → tool ids  a tool        tool_failed | deadline
    finish    turns                           Trajectory           the tools     tool_failed

An infrastructure failure is a value here (`Trajectory.end_reason` with its `detail`); the turns before it are kept for
the log. Any other exception is a bug and flies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from mempo_ray.agent.group import turn_seed
from mempo_ray.agent.memory import ProbeTexts, encode_probe, joined_probe, memory_ids
from mempo_ray.agent.prompt import PastTurn, Renderer
from mempo_ray.agent.protocol import ParsedTurn, extract_answer, format_report, parse_turn
from mempo_ray.agent.tools import Toolbox, ToolCall, ToolSession
from mempo_ray.config.schema import Agent, Rollout
from mempo_ray.contracts import EndReason, EpisodeRequest, Trajectory, Turn
from mempo_ray.errors import DeadlineExceeded, InfrastructureError, ToolFailed
from mempo_ray.ports import Generate, GenerateRequest, Generation, Tokenizer

_NO_IDS = np.empty(0, np.int32)


async def run_episode(
    request: EpisodeRequest,
    *,
    generate: Generate,
    tools: Toolbox,
    renderer: Renderer,
    agent: Agent,
    rollout: Rollout,
    probe_texts: ProbeTexts = joined_probe,
    clock: Callable[[], float] = monotonic,
) -> Trajectory:
    """Run one episode to its end, whichever it is.

    Args:
        generate: may raise InfrastructureError, after its own retries.
        tools: open.
        rollout: `stop_at_tags`, `max_model_len` and `request_timeout_s` are read.
        probe_texts: texts of the task's probes (§3); by default its primary answers joined.
        clock: seconds, monotonic; what a test replaces.
    """
    deadline = clock() + agent.limits.episode_s
    episode = _Episode(request, generate, tools, renderer, agent, rollout, deadline, clock)
    tool_rewards: dict[str, float] = {}
    detail = ""
    async with tools.session(request) as session:
        try:
            end_reason = await episode.play(session)
            tool_rewards = await session.rewards()
        except InfrastructureError as error:
            end_reason, detail = _end_reason(error), str(error)
    return Trajectory(
        task=request.task,
        sibling=request.sibling,
        attempt=request.attempt,
        turns=tuple(episode.turns),
        end_reason=end_reason,
        format_report=format_report(episode.parsed, [len(turn.tool_ids) > 0 for turn in episode.turns]),
        probes=tuple(
            encode_probe("<answer>", text, "</answer>", renderer.tokenizer, objective)
            for text, objective in probe_texts(request.task)
        ),
        answer=extract_answer(episode.parsed),
        detail=detail,
        num_reencoded=episode.num_reencoded,
        tool_rewards=tool_rewards,
    )


@dataclass
class _Episode:
    """The state of an episode between its turns. `deadline` is a reading of `clock`."""

    request: EpisodeRequest
    generate: Generate
    tools: Toolbox
    renderer: Renderer
    agent: Agent
    rollout: Rollout
    deadline: float
    clock: Callable[[], float]
    turns: list[Turn] = field(default_factory=list)
    parsed: list[ParsedTurn] = field(default_factory=list)
    num_reencoded: int = 0

    async def play(self, session: ToolSession) -> EndReason:
        """Turn after turn, until the policy ends the episode. Raises InfrastructureError."""
        initial_ids = prompt_ids = self.renderer.initial_ids(self.request.task.question)
        while (room := self._room(len(prompt_ids), self._spent_tokens())) > 0:
            turn, parsed, call = await self._sample(prompt_ids, room)
            if turn.finish_reason == "length":
                return EndReason.LENGTH
            if parsed.action is not None and parsed.action.name == "answer":
                return EndReason.ANSWERED
            if call is None:
                return EndReason.FORMAT_STOP
            if len(self.turns) == self.agent.max_turns:
                return EndReason.MAX_TURNS
            result = await session.call(call, self.deadline, turn.seed)
            response = self.renderer.tool_ids(result.passages, self.agent.limits.tool_tokens)
            answered = replace(turn, tool_ids=response.ids, tool_text=response.text, passage_ids=response.passage_ids)
            history = [PastTurn(t.output_ids, t.tool_ids, t.memory_ids) for t in (*self.turns[:-1], answered)]
            prompt_ids = self.renderer.next_prompt(initial_ids, history, self.agent)
            if self._room(len(prompt_ids), self._spent_tokens() + len(response.ids)) <= 0:
                break  # no turn follows, and a last turn has no tool response
            self.turns[-1] = answered
        return EndReason.LENGTH

    async def _sample(self, prompt_ids: np.ndarray, room: int) -> tuple[Turn, ParsedTurn, ToolCall | None]:
        """Sample turn number len(turns), parse it and append it."""
        forced_ids = self._forced_ids()
        seed = turn_seed(self.request.seed, len(self.turns))
        generation = await self.generate(
            GenerateRequest(
                prompt_ids=np.concatenate([prompt_ids, forced_ids]),
                seed=seed,
                max_tokens=room,
                group=self.request.task.task_id,
                greedy=self.request.greedy,
                deadline_s=min(self.rollout.request_timeout_s, self._remaining_s()),
            )
        )
        output = _Output.of(generation, forced_ids)
        tokenizer = self.renderer.tokenizer
        if self.rollout.stop_at_tags:
            output = output.cut_after_action(tokenizer, self.tools.tags)
        parsed = parse_turn([tokenizer.token_bytes(i) for i in output.ids], self.tools.tags)
        call = self.tools.call_of(parsed.action)
        memory, num_reencoded = memory_ids(output.ids, parsed, tokenizer)
        turn = Turn(
            prompt_ids=prompt_ids,
            output_ids=output.ids,
            output_logprobs=output.logprobs,
            output_mask=output.mask,
            tool_ids=_NO_IDS,
            memory_ids=memory,
            spans=parsed.spans,
            weight_version=generation.weight_version,
            seed=seed,
            finish_reason=output.finish_reason,
            text=tokenizer.decode(output.said(tokenizer).tolist()),
            query=str(call.arguments.get("query", "")) if call is not None and call.name == "search" else "",
        )
        self.turns.append(turn)
        self.parsed.append(parsed)
        self.num_reencoded += num_reencoded
        return turn, parsed, call

    def _forced_ids(self) -> np.ndarray:
        forced = self.request.forced_memory_S
        return np.asarray(forced[min(len(self.turns), len(forced) - 1)], np.int32) if forced else _NO_IDS

    def _spent_tokens(self) -> int:
        return sum(len(turn.output_ids) + len(turn.tool_ids) for turn in self.turns)

    def _room(self, num_prompt_tokens: int, num_spent: int) -> int:
        """Tokens that the policy may sample next: the turn's own limit, the episode's budget and the model's length,
        less a memory that is forced on the turn."""
        limits = self.agent.limits
        num_tokens = min(
            limits.turn_tokens, limits.episode_tokens - num_spent, self.rollout.max_model_len - num_prompt_tokens
        )
        return num_tokens - len(self._forced_ids())

    def _remaining_s(self) -> float:
        remaining_s = self.deadline - self.clock()
        if remaining_s <= 0:
            raise DeadlineExceeded(
                f"episode of task {self.request.task.task_id!r}: {self.agent.limits.episode_s:g} s are up "
                f"after {len(self.turns)} turns"
            )
        return remaining_s


@dataclass(frozen=True, eq=False)
class _Output:
    """The tokens of a turn and who made them: mask 1 the policy, 0 the system."""

    ids: np.ndarray  # int32 [O]
    logprobs: np.ndarray  # float32 [O]
    mask: np.ndarray  # uint8 [O]
    finish_reason: str

    @classmethod
    def of(cls, generation: Generation, forced_ids: np.ndarray) -> _Output:
        num_forced, num_sampled = len(forced_ids), len(generation.output_ids)
        return cls(
            np.concatenate([forced_ids, np.asarray(generation.output_ids, np.int32)]),
            np.concatenate([np.zeros(num_forced, np.float32), np.asarray(generation.logprobs, np.float32)]),
            np.repeat(np.array([0, 1], np.uint8), [num_forced, num_sampled]),
            generation.finish_reason,
        )

    def said(self, tokenizer: Tokenizer) -> np.ndarray:
        """The ids without the end-of-turn token behind them: a scorer would take it for a part of the answer."""
        ended = len(self.ids) > 0 and self.ids[-1] == tokenizer.end_of_turn_id
        return self.ids[:-1] if ended else self.ids

    def cut_after_action(self, tokenizer: Tokenizer, call_tags: tuple[str, ...]) -> _Output:
        """Stop with the token that completes the first call or answer, and add the end-of-turn token with mask 0.

        Cutting a sample at a stopping time leaves the distribution of what remains as it was, so this is right for any
        engine, whether it stopped there by itself or sampled on.
        """
        parsed = parse_turn([tokenizer.token_bytes(i) for i in self.ids], call_tags)
        if parsed.action is None:
            return self
        num_kept = int(np.searchsorted(parsed.starts_T, parsed.action.stop))
        return _Output(
            np.append(self.ids[:num_kept], np.int32(tokenizer.end_of_turn_id)),
            np.append(self.logprobs[:num_kept], np.float32(0)),
            np.append(self.mask[:num_kept], np.uint8(0)),
            "stop",
        )


def _end_reason(error: InfrastructureError) -> EndReason:
    if isinstance(error, DeadlineExceeded):
        return EndReason.DEADLINE
    return EndReason.TOOL_FAILED if isinstance(error, ToolFailed) else EndReason.ENGINE_FAILED
