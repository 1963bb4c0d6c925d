"""A scripted Engine (`rollout.engine: fake`): no model, no process, the same contract. For tests and benchmarks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mempo_ray.config.schema import Rollout
from mempo_ray.contracts import WeightManifest
from mempo_ray.errors import ConfigError, DeadlineExceeded, EngineFailed, TrainingError
from mempo_ray.generation.engine import NO_WEIGHTS, Continuation, check_scores, verified_gap
from mempo_ray.ports import GenerateRequest, Generation

Script = Callable[[GenerateRequest], Sequence[int]]
"""The whole turn that a request gets, end-of-turn id included; the engine cuts it at `max_tokens`."""

LOGPROB = -1.0
"""What the fake claims for every sampled token; for a given one a multiple of it, by prefix and token."""


def random_turns(model_dir: str, end_of_turn_id: int, answer_share: float = 0.4) -> Script:
    """Well-formed turns of words from their own prompt, drawn by the request's seed: a search, or else an answer.

    Words are the prompt's tokens that hold a letter and no tag. Only tokenizer.json of the model folder is read.
    """
    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def is_word(token_id: int) -> bool:
        token = tokenizer.id_to_token(token_id) or ""
        return "<" not in token and ">" not in token and any(letter.isalpha() for letter in token)

    def script(request: GenerateRequest) -> list[int]:
        rng = np.random.default_rng([0 if request.greedy else request.seed, len(request.prompt_ids)])
        words = [int(token) for token in request.prompt_ids if is_word(int(token))] or [int(request.prompt_ids[0])]

        def block(tag: str, num_words: int) -> list[int]:
            return [*encode(f"<{tag}>"), *rng.choice(words, num_words).tolist(), *encode(f"</{tag}>")]

        last = block("answer", 1) if rng.random() < answer_share else block("search", 2)
        return [*block("mem", 3), *block("think", 2), *last, end_of_turn_id]

    return script


TURN_SIGMA = 0.8
"""Of the logarithm of a timed turn's seconds."""


class FakeEngine:
    """See `engine.Engine`. A turn takes one pass of the event loop, or as long as a `pause`: the clock of tests.

    Nothing is loaded: the fake claims the proof's own log-probs, so only NaN in a proof is refuted.
    """

    def __init__(self, name: str, script: Script, rollout: Rollout, scores: bool = False) -> None:
        self._name = name
        self._script = script
        self._rollout = rollout
        self._scores = scores
        self._version = NO_WEIGHTS
        self._started = False
        self._dead = False
        self._awake = asyncio.Event()  # cleared by a pause
        self._awake.set()
        self._in_flight: dict[asyncio.Future[Generation], tuple[GenerateRequest, int]] = {}
        self._output_tokens = 0

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def errored(self) -> bool:
        return self._dead

    async def start(self) -> None:
        self._started = True

    async def generate(self, request: GenerateRequest) -> Generation:
        if len(request.prompt_ids) >= self._rollout.max_model_len:
            raise ConfigError(f"rollout.max_model_len={self._rollout.max_model_len} leaves no room after the prompt")
        self._check_proven()
        turn = asyncio.get_running_loop().create_future()
        self._in_flight[turn] = request, self._version
        asyncio.get_running_loop().call_soon(self._advance)
        try:
            async with asyncio.timeout(request.deadline_s):
                return await turn
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name}: turn not done within {request.deadline_s:g} s") from None
        finally:
            del self._in_flight[turn]

    async def score(
        self, continuations: Sequence[Continuation], group: str, deadline_s: float
    ) -> tuple[int, list[np.ndarray]]:
        check_scores(self._name, self._scores)
        self._check_proven()
        try:
            async with asyncio.timeout(deadline_s):
                await self._awake.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name}: log-probs not done within {deadline_s:g} s") from None
        self._check_proven()
        return self._version, [
            LOGPROB * (1 + (int(c.prefix_ids.sum()) + c.target_ids) % 7).astype(np.float32) for c in continuations
        ]

    async def update(self, manifest: WeightManifest) -> float:
        self._check_running()
        self._version = NO_WEIGHTS
        try:
            if manifest.uri and not Path(manifest.uri).is_dir():
                raise EngineFailed(f"{self._name}: {manifest.uri} is not a folder")
            claimed = list(manifest.proof.logprobs)
            gap = verified_gap(manifest.proof, claimed, max_gap=0.0, version=manifest.version)
        except (EngineFailed, TrainingError):
            await self.abort_all()
            raise
        self._version = manifest.version
        await self.resume()
        return gap

    async def transfer(self, step: str, info: Mapping[str, object] | None = None) -> None:
        self._check_running()
        self._version = NO_WEIGHTS

    async def pause(self, *, release_memory: bool = False) -> None:
        self._check_running()
        self._awake.clear()

    async def resume(self) -> None:
        self._check_running()
        self._awake.set()
        self._advance()

    async def abort_all(self) -> int:
        waiting = [turn for turn in self._in_flight if not turn.done()]
        for turn in waiting:
            turn.set_exception(EngineFailed(f"{self._name}: aborted"))
        return len(waiting)

    def stats(self) -> dict[str, float]:
        return {
            "num_in_flight": len(self._in_flight),
            "in_flight_tokens": sum(len(r.prompt_ids) + r.max_tokens for r, _ in self._in_flight.values()),
            "num_queued": 0,
            "kv_use": 0.0,
            "output_tokens": self._output_tokens,
            "prompt_tokens": 0,
            "prefix_hit_tokens": 0,
        }

    async def kill(self) -> None:
        """Die as an engine core does: what is in flight fails now, everything else from now on."""
        self._dead = True
        self._awake.set()
        await self.abort_all()

    async def close(self) -> None:
        self._started = False
        self._version = NO_WEIGHTS

    def _advance(self) -> None:
        if not self._awake.is_set():
            return
        for turn, (request, version) in self._in_flight.items():
            if not turn.done():
                turn.set_result(self._sample(request, version))

    def _sample(self, request: GenerateRequest, version: int) -> Generation:
        script = np.asarray(self._script(request), dtype=np.int32)
        room = min(request.max_tokens, self._rollout.max_model_len - len(request.prompt_ids))
        ids = script[:room]
        self._output_tokens += len(ids)
        reason = "stop" if len(ids) == len(script) else "length"
        return Generation(ids, np.full(len(ids), LOGPROB, dtype=np.float32), reason, version)

    def _check_proven(self) -> None:
        self._check_running()
        if self._version == NO_WEIGHTS:
            raise EngineFailed(f"{self._name}: no proven weights; it must be updated first")

    def _check_running(self) -> None:
        if self._dead or not self._started:
            raise EngineFailed(f"{self._name}: the engine is {'dead' if self._dead else 'not running'}")


class TimedEngine(FakeEngine):
    """A FakeEngine whose turns take time (`rollout.fake_turn_s`), `rollout.max_num_seqs` of them at once; others queue.

    Seconds of a turn are log-normal with that mean and σ TURN_SIGMA, drawn by the request's seed.
    """

    def __init__(self, name: str, script: Script, rollout: Rollout, scores: bool = False) -> None:
        super().__init__(name, script, rollout, scores)
        self._slots = asyncio.Semaphore(rollout.max_num_seqs)
        self._timed: dict[asyncio.Future[None], int] = {}  # ends early by an abort → its tokens

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check_proven()
        loop = asyncio.get_running_loop()
        deadline, aborted = loop.time() + request.deadline_s, loop.create_future()
        self._timed[aborted] = len(request.prompt_ids) + request.max_tokens
        try:
            async with asyncio.timeout_at(deadline), self._slots:
                await asyncio.wait([aborted], timeout=self._seconds(request))
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name}: turn not done within {request.deadline_s:g} s") from None
        finally:
            del self._timed[aborted]
        if aborted.done():
            raise EngineFailed(f"{self._name}: aborted")
        return await super().generate(replace(request, deadline_s=deadline - loop.time()))

    def _seconds(self, request: GenerateRequest) -> float:
        rng = np.random.default_rng([request.seed, len(request.prompt_ids)])
        return rng.lognormal(math.log(self._rollout.fake_turn_s) - TURN_SIGMA**2 / 2, TURN_SIGMA)

    async def abort_all(self) -> int:
        waiting = [turn for turn in self._timed if not turn.done()]
        for turn in waiting:
            turn.set_result(None)
        return len(waiting) + await super().abort_all()

    def stats(self) -> dict[str, float]:
        found = super().stats()
        found["num_in_flight"] += len(self._timed)
        found["in_flight_tokens"] += sum(self._timed.values())
        return found
