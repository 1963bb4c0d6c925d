"""A judge behind an OpenAI-compatible endpoint (`style: api`): its last named score, or why there is none.

prompt ──▶ permit of the limiter ──▶ POST /chat/completions ──▶ score_pattern ──▶ Scored
              ▲                        │
              └── try again ◀──────────┴─ 429, 5xx, a broken connection: Retry-After, else exponential with jitter

waits      `judge.timeout_s` for one judgement, its waits for permits and all tries included
on failure Unscored: timeout (no reply in time), infrastructure (busy, down or broken in every try), scorer_error (the
           reply names no score, or the request was refused), data (the template does not fit the row). Never a zero.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from pathlib import Path

import httpx
import jinja2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from mempo_ray.config.schema import Judge
from mempo_ray.contracts import Score, Scored, Unscored
from mempo_ray.errors import ConfigError, DeadlineExceeded, InfrastructureError
from mempo_ray.retry_after import retry_after_s
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.styles.limits import Limiter

MAX_REPLY_BYTES = 1_000_000
MAX_REASON_CHARS = 200
BACKOFF = wait_random_exponential(multiplier=0.5, max=20)
JITTER_S = 0.5  # after Retry-After, so that not all come back at once


class TryAgain(Exception):
    """A request that may succeed later, after `retry_after_s` at the earliest."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ApiJudge:
    """Scores a response by one judge. Lives in one event loop.

    Args:
        name: of the style; the limiter knows it by it.

    Raises:
        ConfigError: the template cannot be read, the pattern is none, or the variable of the key is not set.
    """

    def __init__(self, name: str, judge: Judge, limiter: Limiter) -> None:
        self._name = name
        self._judge = judge
        self._limiter = limiter
        self._template = load_template(f"reward.styles.{name}.judge.template", judge.template)
        self._pattern = _pattern(name, judge)
        self._client = httpx.AsyncClient(headers=_authorization(name, judge), timeout=judge.timeout_s)

    async def __call__(self, response: Response) -> Score:
        try:
            prompt = self._template.render(
                question=response.extra_info.get("question", ""),
                solution=response.solution,
                turns=response.turns,
                answer=response.answer,
                golds=response.golds,
                data_source=response.data_source,
                extra_info=response.extra_info,
            )
        except Exception as error:  # noqa: BLE001 - a template is the user's program: it may raise anything
            return Unscored(f"{self._judge.template}: {type(error).__name__}: {error}", "data")
        last: list[str] = []
        try:
            async with asyncio.timeout(self._judge.timeout_s):
                return self._score_of(await self._ask_until_answered(prompt, last))
        except (TimeoutError, DeadlineExceeded):
            reason = f"no judgement within {self._judge.timeout_s:g} s" + "".join(f"; last try: {r}" for r in last[-1:])
            return Unscored(reason, "timeout")
        except (TryAgain, InfrastructureError) as error:
            return Unscored(str(error), "infrastructure")
        except _Refused as error:
            return Unscored(str(error), "scorer_error")

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask_until_answered(self, prompt: str, failures: list[str]) -> str:
        """The reply's text. `failures` gets what each failed try said."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TryAgain),
            stop=stop_after_attempt(self._judge.retries + 1),
            wait=_wait,
            reraise=True,
            before_sleep=lambda state: failures.append(str(_failure(state))),
        )
        return await retrying(self._ask, prompt)

    async def _ask(self, prompt: str) -> str:
        permit = await self._limiter.acquire(self._name, self._judge.timeout_s)
        try:
            return await self._post(prompt)
        except TryAgain as error:
            if error.retry_after_s:
                await self._limiter.pause(self._name, error.retry_after_s)  # it is meant for all workers
            raise
        finally:
            await asyncio.shield(self._limiter.release(self._name, permit))

    async def _post(self, prompt: str) -> str:
        judge = self._judge
        body = {
            "model": judge.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": judge.max_tokens,
            "temperature": judge.temperature,
        }
        try:
            async with self._client.stream("POST", f"{judge.url.rstrip('/')}/chat/completions", json=body) as reply:
                content = b""
                async for chunk in reply.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_REPLY_BYTES:
                        raise _Refused(f"the judge's reply has more than {MAX_REPLY_BYTES:,} bytes")
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise TryAgain(f"{type(error).__name__}: {error}") from None
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise _Refused(f"the request cannot be made: {error}") from None
        text = content.decode("utf-8", "replace")
        if reply.status_code == 429 or reply.status_code >= 500:
            what = f"HTTP {reply.status_code} from {judge.url}: {text[:MAX_REASON_CHARS]}"
            raise TryAgain(what, retry_after_s(reply.headers.get("retry-after", "")))
        if reply.status_code != 200:
            raise _Refused(f"HTTP {reply.status_code} from {judge.url}: {text[:MAX_REASON_CHARS]}")
        return text

    def _score_of(self, reply: str) -> Score:
        judge = self._judge
        text = _content(reply)
        found = self._pattern.findall(text) if text is not None else []
        if not found:
            return Unscored(f"the judge's reply names no score: {(text or reply)[:MAX_REASON_CHARS]!r}", "scorer_error")
        try:
            raw = float(found[-1])
        except ValueError:
            return Unscored(f"judge.score_pattern finds {found[-1]!r}, which is no number", "scorer_error")
        if not judge.lowest <= raw <= judge.highest:
            return Unscored(
                f"the judge's score {raw:g} is not in [{judge.lowest:g}, {judge.highest:g}]", "scorer_error"
            )
        return Scored((raw - judge.lowest) / (judge.highest - judge.lowest), {"raw": raw, "judgement": text})


class _Refused(Exception):
    """A reply that no further try will change."""


def check_judge(name: str, judge: Judge) -> None:
    """Raises ConfigError as `ApiJudge` does."""
    _pattern(name, judge)
    load_template(f"reward.styles.{name}.judge.template", judge.template)
    _authorization(name, judge)


def load_template(key: str, path: str) -> jinja2.Template:
    """Raises ConfigError: the file cannot be read or is not a jinja template."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error}); give a jinja file.") from None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{key}: {path}, line {error.lineno}: {error.message}.") from None


def _pattern(name: str, judge: Judge) -> re.Pattern[str]:
    key = f"reward.styles.{name}.judge.score_pattern"
    try:
        pattern = re.compile(judge.score_pattern)
    except re.error as error:
        raise ConfigError(f"{key}: {judge.score_pattern!r} is no regular expression ({error}).") from None
    if pattern.groups != 1:
        raise ConfigError(f"{key}: {judge.score_pattern!r} has {pattern.groups} groups; give it one, around the score.")
    return pattern


def _authorization(name: str, judge: Judge) -> dict[str, str]:
    if not judge.api_key_env:
        return {}
    key = os.environ.get(judge.api_key_env)
    if key is None:
        raise ConfigError(f"reward.styles.{name}.judge.api_key_env: the variable {judge.api_key_env} is not set here.")
    return {"Authorization": f"Bearer {key}"}


def _failure(state: RetryCallState) -> TryAgain:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, TryAgain)
    return error


def _wait(state: RetryCallState) -> float:
    asked = _failure(state).retry_after_s
    return BACKOFF(state) if asked is None else asked + random.uniform(0, JITTER_S)


def _content(reply: str) -> str | None:
    """The text of a chat completion, or None."""
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None
