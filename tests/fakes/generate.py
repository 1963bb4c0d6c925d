"""A `ports.Generate` that says what a script tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mempo_ray.errors import InfrastructureError
from mempo_ray.ports import GenerateRequest, Generation, Tokenizer

Line = str | Sequence[int] | InfrastructureError


class ScriptedGenerate:
    """Line n answers call n: a text is encoded and closed with the end-of-turn token, ids are taken as they are, an
    error is raised. Output beyond `max_tokens` is cut (finish reason "length"). `requests` keeps what was asked."""

    def __init__(self, tokenizer: Tokenizer, lines: Sequence[Line], *, weight_version: int = 0) -> None:
        self._tokenizer, self._lines, self._version = tokenizer, list(lines), weight_version
        self.requests: list[GenerateRequest] = []
        self.before_answer: Callable[[], None] = lambda: None  # e.g. moves a fake clock

    async def __call__(self, request: GenerateRequest) -> Generation:
        line = self._lines[len(self.requests)]
        self.requests.append(request)
        self.before_answer()
        if isinstance(line, InfrastructureError):
            raise line
        ids = [*self._tokenizer.encode(line), self._tokenizer.end_of_turn_id] if isinstance(line, str) else list(line)
        kept = np.asarray(ids[: request.max_tokens], np.int32)
        logprobs = -np.arange(1, len(kept) + 1, dtype=np.float32) / 100
        return Generation(kept, logprobs, "length" if len(kept) < len(ids) else "stop", self._version)
