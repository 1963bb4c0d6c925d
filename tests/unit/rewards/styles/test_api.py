"""A judge behind HTTP: the right kind for whatever it does, and limits that hold over all workers."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from mempo_ray.actors.limiter import JudgeLimiter
from mempo_ray.config.schema import Judge, Style
from mempo_ray.contracts import Scored, Unscored
from mempo_ray.errors import ConfigError
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.styles.api import ApiJudge, check_judge
from tests.fakes.judge_server import JudgeServer


def response(prompt: str) -> Response:
    return Response("nq", (("Paris",),), (prompt,), "Paris", extra_info={"question": "Where?"})


@pytest.fixture
def template(tmp_path: Path) -> str:
    """The policy's text is the prompt."""
    path = tmp_path / "judge.jinja"
    path.write_text("{{ solution }}")
    return str(path)


@pytest.fixture
def server():
    with JudgeServer() as server:
        yield server


def judge(server: JudgeServer, template: str, **more) -> Judge:
    settings = {"requests_per_s": 200, "timeout_s": 20, "retries": 2, "highest": 10, **more}
    return Judge(url=server.url, model="m", template=template, **settings)


async def ask(settings: Judge, *prompts: str):
    style = Style(style="api", judge=settings)
    asked = ApiJudge("judge", settings, JudgeLimiter({"judge": style}))
    scores = await asyncio.gather(*(asked(response(prompt)) for prompt in prompts))
    await asked.close()
    return scores


async def test_the_last_named_score_counts_on_the_judges_scale(server, template):
    (score,) = await ask(judge(server, template), "Score: 3, no: score 7.5")
    assert score == Scored(0.75, {"raw": 7.5, "judgement": "Score: 3, no: score 7.5"})


@pytest.mark.parametrize(
    ("prompt", "kind", "reason"),
    [
        ("500", "infrastructure", "HTTP 500"),
        ("429", "infrastructure", "HTTP 429"),
        ("400", "scorer_error", "HTTP 400"),
        ("garbage", "scorer_error", "names no score: '<html>'"),
        ("fine work", "scorer_error", "names no score: 'fine work'"),
        ("score 11", "scorer_error", "11 is not in [0, 10]"),
    ],
)
async def test_what_is_no_score_has_the_right_kind(server, template, prompt, kind, reason):
    bad, good = await ask(judge(server, template), prompt, "score 5")
    assert isinstance(bad, Unscored)
    assert (bad.kind, reason in bad.reason) == (kind, True), bad
    assert good.score == 0.5


async def test_silence_is_a_timeout_with_all_its_tries(server, template):
    (score,) = await ask(judge(server, template, timeout_s=0.5), "silence")
    assert isinstance(score, Unscored)
    assert score.kind == "timeout"


async def test_an_error_is_tried_again_and_its_tries_have_an_end(server, template):
    await ask(judge(server, template, retries=2), "500")
    assert len(server.starts_s) == 3


async def test_after_429_nobody_asks_before_the_server_allows_it(server, template):
    settings = judge(server, template, concurrency=1)
    busy, *others = await ask(settings, "busy 4", "score 5", "score 6")
    assert [s.score for s in (busy, *others)] == [0.4, 0.5, 0.6]
    assert all(start >= server.busy_until_s for start in server.starts_s[1:])


async def test_a_judge_that_is_not_there_is_infrastructure(template):
    with JudgeServer() as server:
        settings = judge(server, template, retries=1)
    (score,) = await ask(settings, "score 1")
    assert (score.kind, "ConnectError" in score.reason) == ("infrastructure", True)


async def test_four_workers_together_keep_the_limits(server, template):
    settings = judge(server, template, requests_per_s=40, concurrency=3)
    limiter = JudgeLimiter({"judge": Style(style="api", judge=settings)})
    grants: list[float] = []
    acquire = limiter.acquire

    async def noting(name: str, timeout_s: float) -> int:
        permit = await acquire(name, timeout_s)
        grants.append(asyncio.get_running_loop().time())
        return permit

    limiter.acquire = noting
    workers = [ApiJudge("judge", settings, limiter) for _ in range(4)]
    prompts = ["score 5", "500", "garbage", "score 7"] * 2
    scores = await asyncio.gather(*(worker(response(prompt)) for worker in workers for prompt in prompts))
    assert [getattr(s, "kind", s.__class__.__name__) for s in scores] == [
        "Scored",
        "infrastructure",
        "scorer_error",
        "Scored",
    ] * 8
    assert server.most_in_flight == 3
    assert (
        min(b - a for a, b in itertools.pairwise(sorted(grants))) >= 1 / 40 - 0.005
    )  # as far as the loop's clock goes
    await asyncio.gather(*(worker.close() for worker in workers))


@pytest.mark.parametrize(("text", "reason"), [("{{ rubric }}", "rubric"), ("{{ question + 1 }}", "TypeError")])
async def test_a_template_that_does_not_fit_the_row_is_data(server, tmp_path, text, reason):
    path = tmp_path / "judge.jinja"
    path.write_text(text)
    (score,) = await ask(judge(server, str(path)), "score 1")
    assert (score.kind, reason in score.reason) == ("data", True)


async def test_a_request_that_cannot_be_made_is_refused_and_not_tried_again(server, template):
    settings = judge(server, template).model_copy(update={"url": "http://[::"})
    for score in (*await ask(settings, "score 1"), *await ask(judge(server, template), "a lone surrogate: \ud800")):
        assert (score.kind, "cannot be made" in score.reason) == ("scorer_error", True)
    assert not server.starts_s


def test_mistakes_in_the_section_are_told_before_anything_is_asked(tmp_path):
    path = tmp_path / "judge.jinja"
    path.write_text("{% if %}")
    limiter = JudgeLimiter({})
    with pytest.raises(ConfigError, match=r"judge\.template: .*line 1"):
        ApiJudge("j", Judge(template=str(path)), limiter)
    with pytest.raises(ConfigError, match=r"judge\.template: .* cannot be read"):
        ApiJudge("j", Judge(template="no-such-file"), limiter)
    path.write_text("ok")
    with pytest.raises(ConfigError, match=r"api_key_env: the variable NO_SUCH_KEY is not set"):
        ApiJudge("j", Judge(template=str(path), api_key_env="NO_SUCH_KEY"), limiter)
    for pattern, reason in (("score (", "no regular expression"), (r"score \d", "0 groups"), ("(a)(b)", "2 groups")):
        with pytest.raises(ConfigError, match=rf"judge\.score_pattern: .*{reason}"):
            check_judge("j", Judge(template=str(path), score_pattern=pattern))
