"""`ports.Search` over somebody else's retrieval server (`retrieval.backend: http`).

queries ──POST {"queries", "topk", "return_scores"}──▶ server ──{"result": [[…], …]}──▶ passages

failure                               what becomes of it
no connection, 408, 429, 5xx          asked again after a random wait, or what Retry-After says; 4 times in all
401, 403, 404, 405                    ConfigError: the address is wrong, and asking again changes nothing
another 4xx, a reply of another form  ToolFailed
silence                               DeadlineExceeded after `agent.limits.search_s`
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from mempo_ray.contracts import Passage
from mempo_ray.errors import ConfigError, DeadlineExceeded, ToolFailed
from mempo_ray.retry_after import retry_after_s

ATTEMPTS = 4
LONGEST_WAIT_S = 10.0
WRONG_ADDRESS = (401, 403, 404, 405)
TRY_AGAIN = (408, 429)


class _TryAgain(ToolFailed):
    """A failure that another try may not meet. `after_s`: what the server asked for."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class HttpSearch:
    """A client with its own connections; one for each process.

    Args:
        deadline_s: of one search, its retries included.
        transport, sleep: what a test replaces.
    """

    def __init__(
        self,
        url: str,
        deadline_s: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._url, self._deadline_s, self._sleep = url, deadline_s, sleep
        # no timeouts of httpx: `deadline_s` is the one deadline
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), transport=transport)
        self.num_failures = 0
        """Replies that were none, since the start."""

    async def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """A query that is empty or no text finds nothing, and is not sent.

        Raises:
            ToolFailed, DeadlineExceeded, ConfigError: see the table above.
        """
        asked = [query for query in queries if _can_be_sent(query)]
        if not asked:
            return [[] for _ in queries]
        try:
            async with asyncio.timeout(self._deadline_s):
                found = iter(await self._ask(asked, top_k))
        except TimeoutError:
            self.num_failures += 1
            raise DeadlineExceeded(f"retrieval.url: {self._url} did not answer within {self._deadline_s:g} s") from None
        return [next(found) if _can_be_sent(query) else [] for query in queries]

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TryAgain),
            stop=stop_after_attempt(ATTEMPTS),
            wait=_wait_s,
            sleep=self._sleep,
            reraise=True,
        )
        return await retrying(self._ask_once, queries, top_k)

    async def _ask_once(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        try:
            return await self._exchange(queries, top_k)
        except (ToolFailed, ConfigError):
            self.num_failures += 1
            raise

    async def _exchange(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        body = {"queries": list(queries), "topk": top_k, "return_scores": True}
        try:
            response = await self._client.post(self._url, json=body)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(f"retrieval.url: {self._url!r} is no address: {error}") from error
        except httpx.TransportError as error:
            raise _TryAgain(f"retrieval.url: {self._url}: {type(error).__name__}: {error}") from error
        status = response.status_code
        said = f"retrieval.url: {self._url} answered {status}: {response.text[:200]!r}"
        if status in TRY_AGAIN or status >= 500:
            asked_s = retry_after_s(response.headers.get("Retry-After", ""))
            raise _TryAgain(said, min(asked_s or 0.0, LONGEST_WAIT_S))
        if status in WRONG_ADDRESS:
            raise ConfigError(f"{said}; give the address that takes queries, such as http://host:8000/retrieve")
        if status != 200:
            raise ToolFailed(said)
        try:
            return parse_reply(response.json(), len(queries))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ToolFailed(f"{said} is no reply of a retrieval server: {error!r}") from error


def _can_be_sent(query: str) -> bool:
    """Half of a UTF-16 pair has no form in UTF-8."""
    return bool(query.strip()) and not any("\ud800" <= letter <= "\udfff" for letter in query)


def parse_reply(reply: Any, num_queries: int) -> list[list[Passage]]:
    """Passages from the body of a reply, with scores or without (then 0).

    A document has `title` and `text`, or `contents`: title line, newline, text.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it has another form.

    Example:
        {"result": [[{"document": {"id": "7", "contents": "Sari\\nA judge."}, "score": 0.8}]]}
        → [[Passage("7", "Sari", "A judge.", 0.8)]]
    """
    found = [[_passage(hit) for hit in hits] for hits in reply["result"]]
    if len(found) != num_queries:
        raise ValueError(f"{len(found)} results for {num_queries} queries")
    return found


def _passage(hit: dict[str, Any]) -> Passage:
    document, score = (hit["document"], float(hit["score"])) if "document" in hit else (hit, 0.0)
    if "text" in document:
        title, text = document.get("title") or "", document["text"]
    else:
        title, _, text = document["contents"].partition("\n")
        title = title.strip().strip('"')
    return Passage(str(document.get("id", "")), title, text, score)


_random_wait_s = wait_random_exponential(multiplier=0.1, max=LONGEST_WAIT_S)


def _wait_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    return max(_random_wait_s(state), error.after_s if isinstance(error, _TryAgain) else 0.0)
