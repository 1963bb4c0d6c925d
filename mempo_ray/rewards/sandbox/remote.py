"""Code in a remote sandbox that speaks Sandbox-Fusion's HTTP form (github.com/bytedance/SandboxFusion, `/run_code`).

{"code", "stdin", "language", "compile_timeout", "run_timeout", "memory_limit_MB"} ──▶
{"status": "Success" | "Failed" | "SandboxError",
 "run_result": {"status": "Finished" | "TimeLimitExceeded" | "Error", "return_code", "stdout", "stderr",
                "execution_time"}}
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from mempo_ray.config.schema import Sandbox
from mempo_ray.errors import DeadlineExceeded, InfrastructureError
from mempo_ray.retry_after import retry_after_s
from mempo_ray.rewards.sandbox.local import classify
from mempo_ray.rewards.sandbox.outcome import Limits, Outcome, Status

SPARE_S = 10.0  # of a request, beyond the code's own time: network, queue, start
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
RETRIED = {429, 500, 502, 503, 504}


class _TryAgain(InfrastructureError):
    """A failure that may be gone at the next try, and how many seconds the server asked to wait."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class RemoteSandbox:
    """`CodeRunner` of a service: `concurrency` requests at once, one deadline over all tries of a request.

    The deadline is `Limits.wall_s` and 10 s. Tried again, `retries` times with jitter: no connection, no answer, 429
    (after its Retry-After) and 5xx. Not tried again: another refusal, or an answer in another form.
    """

    def __init__(
        self, settings: Sandbox, *, spare_s: float = SPARE_S, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._settings, self._limits, self._sleep, self._spare_s = settings, Limits.of(settings), sleep, spare_s
        self._client = httpx.Client()
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="remote-sandbox")

    def run(self, source: str, stdin: str = "", *, at_most_s: float = math.inf) -> Outcome:
        return self._threads.submit(self._run, source, stdin, self._limits.within(at_most_s)).result()

    async def run_async(self, source: str, stdin: str = "", *, at_most_s: float = math.inf) -> Outcome:
        return await asyncio.wrap_future(self._threads.submit(self._run, source, stdin, self._limits.within(at_most_s)))

    def _run(self, source: str, stdin: str, limits: Limits) -> Outcome:
        deadline = time.monotonic() + limits.wall_s + self._spare_s
        failure: InfrastructureError | None = None
        for attempt in range(self._settings.retries + 1):
            try:
                if isinstance(failure, _TryAgain):
                    wait_s = max(failure.wait_s, random.uniform(0, min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)))
                    if wait_s > deadline - time.monotonic():
                        break
                    self._sleep(wait_s)
                return _outcome_of(self._post(source, stdin, limits, deadline), limits)
            except _TryAgain as error:
                failure = error
            except InfrastructureError as error:
                failure = error
                break
        return Outcome(Status.SANDBOX_FAILED, detail=f"{self._settings.url}: {failure}")

    def _post(self, source: str, stdin: str, limits: Limits, deadline: float) -> bytes:
        """The body of the answer, read no longer than to the deadline and no further than the output limit allows."""
        request = {
            "code": source, "stdin": stdin, "language": "python", "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s, "memory_limit_MB": limits.memory_bytes >> 20,
        }  # fmt: skip
        body, most = bytearray(), 16 * limits.output_bytes + (1 << 16)  # JSON writes a byte in up to 6 characters
        try:
            timeout = max(deadline - time.monotonic(), 0.001)
            with self._client.stream("POST", self._settings.url, json=request, timeout=timeout) as response:
                if response.status_code in RETRIED:
                    asked_s = retry_after_s(response.headers.get("Retry-After", ""))
                    raise _TryAgain(f"HTTP {response.status_code}", asked_s or 0.0)
                if response.status_code != 200:
                    raise InfrastructureError(f"HTTP {response.status_code}")
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > most:
                        raise InfrastructureError(f"an answer of more than {most} bytes")
                    if time.monotonic() > deadline:
                        raise DeadlineExceeded("no complete answer by the deadline")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        return bytes(body)


def _outcome_of(body: bytes, limits: Limits) -> Outcome:
    """An answer as an `Outcome`.

    Raises:
        InfrastructureError: it is not in the form above, or the service says that it failed itself.
    """
    try:
        answer = json.loads(body)
        result = answer["run_result"] or {}
        stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
        seconds = float(result.get("execution_time") or 0.0)
        state = (answer["status"], result.get("status"))
        code = result.get("return_code")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InfrastructureError(f"an answer in another form ({type(error).__name__}: {error})") from error
    texts = {"stdout": stdout[: limits.output_bytes], "stderr": stderr[: limits.output_bytes]}
    if state == ("Failed", "TimeLimitExceeded"):
        return Outcome(Status.TIMEOUT, **texts, seconds=seconds, detail=f"still running after {limits.wall_s:g} s")
    if state[0] not in ("Success", "Failed") or state[1] != "Finished" or not isinstance(code, int):
        raise InfrastructureError(f"status {state[0]!r}, run status {state[1]!r}: {str(answer.get('message'))[:500]}")
    if max(len(stdout), len(stderr)) > limits.output_bytes:
        return Outcome(Status.OUTPUT_LIMIT, **texts, seconds=seconds, detail=f"more than {limits.output_bytes} bytes")
    status, detail = classify(code, stderr)
    return Outcome(status, **texts, exit_code=code if status is Status.OK else None, seconds=seconds, detail=detail)
