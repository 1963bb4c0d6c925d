"""The client of somebody else's retrieval server, against a server that misbehaves as told."""

import asyncio
import datetime
import email.utils
import json

import httpx
import pytest

from mempo_ray.actors.search_http import ATTEMPTS, LONGEST_WAIT_S, HttpSearch, parse_reply
from mempo_ray.contracts import Passage
from mempo_ray.errors import ConfigError, DeadlineExceeded, ToolFailed

URL = "http://retrieval.example:8000/retrieve"
GOOD = {"result": [[{"document": {"id": "7", "contents": "Sari\nA judge."}, "score": 0.8}]]}
FOUND = [[Passage("7", "Sari", "A judge.", 0.8)]]

Answer = httpx.Response | Exception


class Server:
    """Gives one answer after the other, the last one for ever. `bodies` keeps what was asked, `waits` the pauses."""

    def __init__(self, *answers: Answer, deadline_s: float = 10.0) -> None:
        self._answers = list(answers)
        self.bodies: list[dict] = []
        self.waits: list[float] = []
        self.search = HttpSearch(URL, deadline_s, transport=httpx.MockTransport(self._answer), sleep=self._sleep)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


def good() -> httpx.Response:
    return httpx.Response(200, json=GOOD)


async def test_it_asks_in_search_r1_s_form_and_does_not_send_what_is_no_query():
    server = Server(good())
    assert await server.search(["", "mentor Boko", " \n", "half a pair \ud83d"], 3) == [[], FOUND[0], [], []]
    assert server.bodies == [{"queries": ["mentor Boko"], "topk": 3, "return_scores": True}]
    assert await server.search([" "], 3) == [[]]
    assert len(server.bodies) == 1
    assert server.search.num_failures == 0


@pytest.mark.parametrize(
    "failure",
    [httpx.ConnectError("refused"), httpx.ReadError("reset"), *(httpx.Response(s) for s in (408, 429, 500, 503))],
    ids=str,
)
async def test_what_another_try_may_not_meet_is_tried_again(failure):
    server = Server(failure, failure, good())
    assert await server.search(["mentor Boko"], 3) == FOUND
    assert len(server.waits) == server.search.num_failures == 2


async def test_after_four_tries_it_gives_up_with_the_last_reason():
    server = Server(httpx.Response(500, text="out of memory"))
    with pytest.raises(ToolFailed, match=r"retrieval\.url: .* answered 500: 'out of memory'"):
        await server.search(["mentor Boko"], 3)
    assert len(server.bodies) == ATTEMPTS


async def test_it_waits_as_long_as_the_server_asks_in_seconds_or_by_a_date_up_to_a_limit():
    far = email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1), usegmt=True)
    for asked, waits_s in (("3", 3), ("3600", LONGEST_WAIT_S), (far, LONGEST_WAIT_S), ("soon", 0)):
        server = Server(httpx.Response(503, headers={"Retry-After": asked}), good())
        await server.search(["mentor Boko"], 3)
        assert waits_s <= server.waits[0] <= max(waits_s, 0.1)


@pytest.mark.parametrize("status", [401, 403, 404, 405])
async def test_a_wrong_address_is_the_user_s_to_mend_and_not_asked_again(status):
    server = Server(httpx.Response(status))
    with pytest.raises(ConfigError, match=rf"retrieval\.url: {URL} answered {status}.*give the address"):
        await server.search(["mentor Boko"], 3)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(400, text="query too long"),
        httpx.Response(200, text="<html>proxy</html>"),
        httpx.Response(200, json={"results": []}),
        httpx.Response(200, json={"result": []}),
        httpx.Response(200, json={"result": [["text"]]}),
        httpx.Response(200, json={"result": [[{"document": {"id": "7"}, "score": 1}]]}),
        httpx.Response(200, json=[1]),
    ],
    ids=["400", "html", "other key", "too few", "text", "no contents", "list"],
)
async def test_a_reply_of_another_form_fails_the_search_and_is_not_asked_again(reply):
    server = Server(reply)
    with pytest.raises(ToolFailed, match=r"retrieval\.url"):
        await server.search(["mentor Boko"], 3)
    assert len(server.bodies) == 1


async def test_silence_ends_at_the_deadline():
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        return good()

    search = HttpSearch(URL, 0.01, transport=httpx.MockTransport(never))
    with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.01 s"):
        await search(["mentor Boko"], 3)


@pytest.mark.parametrize("url", ["http://host:port/retrieve", "ftp://host/retrieve"])
async def test_a_url_that_is_none_is_the_configuration_s_mistake(url):
    with pytest.raises(ConfigError, match=r"retrieval\.url"):
        await HttpSearch(url, 1.0)(["mentor Boko"], 3)


@pytest.mark.parametrize(
    ("hit", "passage"),
    [
        ({"document": {"id": 7, "contents": '"Sari"\nA judge.\nOf Kim.'}, "score": 1},
         Passage("7", "Sari", "A judge.\nOf Kim.", 1.0)),
        ({"id": "7", "contents": "Sari\nA judge."}, Passage("7", "Sari", "A judge.", 0.0)),
        ({"document": {"title": None, "text": "A judge.", "contents": "x"}, "score": "0.5"},
         Passage("", "", "A judge.", 0.5)),
    ],
    ids=["contents", "without scores", "text"],
)  # fmt: skip
def test_the_forms_of_a_document(hit, passage):
    assert parse_reply({"result": [[hit]]}, 1) == [[passage]]
