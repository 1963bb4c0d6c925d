"""A remote sandbox that answers, fails, babbles or is silent: the code's doing is an outcome, the rest is not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mempo_ray.config.schema import Sandbox
from mempo_ray.rewards.sandbox import open_sandbox
from mempo_ray.rewards.sandbox.outcome import Outcome, Status
from mempo_ray.rewards.sandbox.remote import RemoteSandbox
from tests.fakes.judges import Answer, Reply, scripted_server


def ok(stdout: str = "4\n", stderr: str = "", code: int = 0) -> Answer:
    result = {"status": "Finished", "execution_time": 0.02, "return_code": code, "stdout": stdout, "stderr": stderr}
    return Answer(body={"status": "Failed" if code else "Success", "message": "", "run_result": result})


TIME_LIMIT = Answer(body={"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded"}})
SANDBOX_ERROR = Answer(
    body={"status": "SandboxError", "message": "disk full", "run_result": {"status": "Error", "stderr": "disk full"}}
)


def ask(reply: Reply, *, retries: int = 2, spare_s: float = 20.0) -> tuple[Outcome, int, list[float]]:
    """The outcome of one run, how many requests it took, and the seconds waited before each further one."""
    waits: list[float] = []
    with scripted_server(reply) as server:
        settings = Sandbox(url=server.url, retries=retries, run_s=0.1)
        outcome = RemoteSandbox(settings, spare_s=spare_s, sleep=waits.append).run("print(2 + 2)", "in")
    return outcome, len(server.requests), waits


def test_the_request_has_sandbox_fusion_s_form():
    with scripted_server(lambda request, number: ok()) as server:
        sandbox = open_sandbox(Sandbox(url=server.url, run_s=3, memory_mb=256))
        outcome = sandbox.run("print(2 + 2)", "in", at_most_s=2)
        sandbox.run("", at_most_s=20)
    assert [request["run_timeout"] for request in server.requests] == [2, 9]
    assert server.requests[:1] == [
        {
            "code": "print(2 + 2)", "stdin": "in", "language": "python", "compile_timeout": 2, "run_timeout": 2,
            "memory_limit_MB": 256,
        }
    ]  # fmt: skip
    assert (outcome.status, outcome.stdout, outcome.exit_code, outcome.seconds) == (Status.OK, "4\n", 0, 0.02)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (ok(), Status.OK),
        (ok(code=1, stderr="NameError: x"), Status.OK),
        (ok(code=1, stderr="MemoryError"), Status.MEMORY),
        (ok(code=-9), Status.KILLED),
        (ok(stdout="x" * 2_000_000), Status.OUTPUT_LIMIT),
        (TIME_LIMIT, Status.TIMEOUT),
    ],
)
def test_what_the_code_did_is_its_outcome_at_the_first_try(answer, status):
    outcome, num_requests, _ = ask(lambda request, number: answer)
    assert (outcome.status, num_requests) == (status, 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(body="<html>busy</html>"), "another form"),
        (Answer(body=[1, 2]), "another form"),
        (Answer(body={"status": "Success", "run_result": None}), "run status None"),
        (SANDBOX_ERROR, "disk full"),
        (Answer(404), "HTTP 404"),
        (Answer(body="x" * 30_000_000), "more than"),
    ],
)
def test_an_answer_that_is_none_is_no_outcome_and_not_asked_for_again(answer, reason):
    outcome, num_requests, _ = ask(lambda request, number: answer)
    assert (outcome.status, num_requests) == (Status.SANDBOX_FAILED, 1)
    assert reason in outcome.detail


def test_a_failed_server_is_asked_again_with_jitter():
    outcome, num_requests, waits = ask(lambda request, number: Answer(500) if number < 2 else ok())
    assert (outcome.status, num_requests) == (Status.OK, 3)
    assert len(waits) == 2
    assert max(waits) < 1


def test_a_server_that_keeps_failing_is_asked_as_often_as_allowed():
    outcome, num_requests, _ = ask(lambda request, number: Answer(503), retries=3)
    assert (outcome.status, num_requests) == (Status.SANDBOX_FAILED, 4)
    assert "HTTP 503" in outcome.detail


def test_retry_after_is_obeyed():
    busy = Answer(429, headers={"Retry-After": "7"})
    outcome, _, waits = ask(lambda request, number: ok() if number else busy)
    assert (outcome.status, waits) == (Status.OK, [7.0])


def test_a_wait_beyond_the_deadline_is_not_begun():
    outcome, num_requests, waits = ask(lambda request, number: Answer(429, headers={"Retry-After": "3600"}))
    assert (outcome.status, num_requests, waits) == (Status.SANDBOX_FAILED, 1, [])
    date = "Fri, 01 Jan 2100 00:00:00 GMT"
    _, num_requests, _ = ask(lambda request, number: Answer(429, headers={"Retry-After": date}))
    assert num_requests == 1


def test_silence_ends_at_the_deadline():
    outcome, _, _ = ask(lambda request, number: Answer(body=None), spare_s=0.3)
    assert outcome.status is Status.SANDBOX_FAILED
    assert "ReadTimeout" in outcome.detail


def test_nobody_at_that_address_is_no_outcome():
    outcome = RemoteSandbox(Sandbox(url="http://127.0.0.1:9/run_code", retries=1), sleep=lambda s: None).run("1")
    assert outcome.status is Status.SANDBOX_FAILED
    assert "ConnectError" in outcome.detail


async def test_no_more_requests_are_open_than_allowed():
    both = threading.Barrier(2)

    def reply(request: dict, number: int) -> Answer:
        both.wait(20)  # passes only if two requests are open
        return ok()

    with scripted_server(reply) as server:
        sandbox = RemoteSandbox(Sandbox(url=server.url, concurrency=2))
        outcomes = await asyncio.gather(*(sandbox.run_async("1") for _ in range(8)))
    assert {outcome.status for outcome in outcomes} == {Status.OK}
    assert server.most_open == 2
