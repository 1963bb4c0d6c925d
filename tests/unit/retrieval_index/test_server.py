"""The HTTP form, by the bodies that other systems' clients send and read."""

import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from retrieval_index.errors import SearchFailed, SearchTimeout, ServeError, ServiceClosed, ServiceOverloaded
from retrieval_index.server import MAX_BODY_BYTES, TOO_LARGE, make_app, serve
from retrieval_index.service import Result, RetrievalService, ServiceLimits

from .conftest import facts


class Client:
    """An HTTP client of an application, in the same process."""

    def __init__(self, app: object) -> None:
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://retrieval")

    async def post(self, path: str, body: object) -> object:
        response = await self._client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, body: object) -> httpx.Response:
        return await self._client.post(path, json=body)

    async def send(self, path: str, body: bytes) -> httpx.Response:
        return await self._client.post(path, content=body, headers={"Content-Type": "application/json"})

    async def get(self, path: str) -> dict:
        return (await self._client.get(path)).json()


@pytest.fixture
async def client(index_folder: Path) -> AsyncIterator[Client]:
    service = RetrievalService.open(index_folder, num_threads=1, limits=ServiceLimits(max_wait_s=0))
    app = make_app(service, index_folder)
    async with app.router.lifespan_context(app):
        yield Client(app)


def contents(identity: str) -> str:
    fact = next(fact for fact in facts() if fact.id == identity)
    return f"{fact.title}\n{fact.text}"


async def test_the_body_of_search_r1_s_client(client: Client) -> None:
    """It sends queries of a whole batch and reads result[i][j]["document"]["contents"]: title line, then text."""
    body = {"queries": ["mentor Boko", "boss Sari"], "topk": 3, "return_scores": True}
    reply = await client.post("/retrieve", body)
    assert [len(hits) for hits in reply["result"]] == [3, 3]
    for hits, best in zip(reply["result"], ("mentor-Boko", "boss-Sari"), strict=True):
        assert hits[0]["document"]["contents"] == contents(best)
        scores = [hit["score"] for hit in hits]
        assert scores == sorted(scores, reverse=True)
        title, text = hits[0]["document"]["contents"].split("\n", 1)
        assert (title, text) == (hits[0]["document"]["title"], hits[0]["document"]["text"])


async def test_the_body_of_verl_s_search_tool(client: Client) -> None:
    """It always asks for scores, joins result[i] into one text, and counts a list that is empty as no result."""
    reply = await client.post("/retrieve", {"queries": ["mentor Boko"], "topk": 2, "return_scores": True})
    assert set(reply) == {"result"}
    assert all(set(hit) == {"document", "score"} for hit in reply["result"][0])
    assert reply["result"][0][0]["document"]["contents"].split("\n")[0] == "Boko"


async def test_the_bodies_of_asearcher_s_client(client: Client) -> None:
    """It asks without scores, keeps `contents` and `url` of each document, and opens such a url later."""
    reply = await client.post("/retrieve", {"queries": ["mentor Boko"], "topk": 5, "return_scores": False})
    (documents,) = reply["result"]
    assert len(documents) == 5
    assert documents[0]["contents"] == contents("mentor-Boko")
    pages = await client.post(
        "/access", {"urls": ["passage:boss-Sari", "https://elsewhere.example/page", documents[0]["url"]]}
    )
    assert pages == {"result": [{"contents": contents("boss-Sari")}, None, {"contents": contents("mentor-Boko")}]}
    assert await client.post("/access", {"urls": []}) == {"result": []}


@pytest.mark.parametrize("topk", [{}, {"topk": None}, {"topk": 0}], ids=["missing", "null", "zero"])
async def test_without_a_topk_three_passages_come_and_without_return_scores_no_scores(client: Client, topk) -> None:
    (documents,) = (await client.post("/retrieve", {"queries": ["mentor Boko"], **topk}))["result"]
    assert [set(document) for document in documents] == [{"id", "contents", "title", "text", "url"}] * 3


async def test_a_query_that_cannot_be_searched_finds_nothing_and_spoils_nothing(client: Client) -> None:
    queries = ["", "mentor Boko", "x" * 100_000]
    found = (await client.post("/retrieve", {"queries": queries, "topk": 1}))["result"]
    assert [len(documents) for documents in found] == [0, 1, 0]
    assert (await client.post("/retrieve", {"queries": []}))["result"] == []


async def test_a_topk_larger_than_the_index_gives_all_of_it(client: Client) -> None:
    (documents,) = (await client.post("/retrieve", {"queries": ["mentor Boko"], "topk": 1000}))["result"]
    assert len(documents) == len(facts())


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"query": "mentor Boko"}, "queries"),
        ({"queries": "mentor Boko"}, "list"),
        ({"queries": [7]}, "string"),
        ({"queries": ["a"], "topk": -1}, "topk"),
        ({"queries": ["a"], "topk": 100_000}, "topk"),
        ({"queries": ["a"] * 5_000}, "4096"),
    ],
)
async def test_a_wrong_body_is_the_client_s_mistake_and_says_where(client: Client, body, word) -> None:
    response = await client.refused("/retrieve", body)
    assert response.status_code == 422
    assert word in response.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"\xff\xfe", 422),
        (b'{"queries": ["\xff"]}', 400),  # FastAPI's own answer to bytes that are not UTF-8
        (b"", 422),
        (b"[" * 100_000, 400),
        (b'{"queries": "\\ud800"}', 422),  # these three cannot be repeated in a reply
        (b'{"queries": [NaN]}', 422),
        (b'{"queries": ["a"], "topk": 1e400}', 422),
    ],
)
async def test_a_body_that_is_not_text_or_not_json_is_answered_with_a_sentence(client: Client, body, status) -> None:
    response = await client.send("/retrieve", body)
    assert response.status_code == status
    assert isinstance(response.json()["detail"], str)


async def test_a_body_of_gigabytes_is_not_read(client: Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(2**32)}
    response = await client._client.post("/retrieve", content=b"{}", headers=headers)
    assert response.status_code == 413
    assert response.json() == {"detail": TOO_LARGE}


async def test_a_body_that_does_not_say_its_length_is_read_up_to_the_limit(client: Client) -> None:
    num_sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1_000):
            num_sent += 1
            yield b" " * 2**20

    headers = {"Content-Type": "application/json"}
    response = await client._client.post("/retrieve", content=chunks(), headers=headers)
    assert (response.status_code, response.json()) == (413, {"detail": TOO_LARGE})
    assert num_sent == MAX_BODY_BYTES / 2**20 + 1


async def test_half_of_a_utf_16_pair_finds_nothing_and_is_no_address(client: Client) -> None:
    body = b'{"queries": ["mentor Boko \\ud83d", "mentor Boko"], "topk": 1}'
    assert [len(hits) for hits in (await client.send("/retrieve", body)).json()["result"]] == [0, 1]
    assert (await client.send("/access", b'{"urls": ["\\ud800"]}')).json() == {"result": [None]}


async def test_health_says_what_is_served_and_stats_what_was(client: Client, index_folder: Path) -> None:
    health = await client.get("/health")
    assert (health["status"], health["passages"]) == ("ok", len(facts()))
    await client.post("/retrieve", {"queries": ["mentor Boko", "mentor Boko"]})
    stats = await client.get("/stats")
    assert (stats["queries"], stats["shared"]) == (3, 1), "one to warm up, and two equal ones"


class Failing:
    """Searches that end as told."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.closed = False

    async def warm_up(self) -> None:
        pass

    async def search(self, queries: Sequence[str], top_k: int) -> list[Result]:
        raise self.error

    async def counters(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (ServiceOverloaded("4096 queries wait", "retrieval", "later"), 503, "1"),
        (ServiceClosed("it was closed", "retrieval"), 503, "1"),
        (SearchTimeout("no result after 30 s", "retrieval"), 504, None),
        (SearchFailed("encoder", "retrieval"), 500, None),
    ],
)
async def test_a_search_that_did_not_happen_is_json_with_a_status_that_says_whether_to_come_again(
    index_folder: Path, error: Exception, status: int, retry_after: str | None
) -> None:
    searches = Failing(error)
    app = make_app(searches, index_folder)
    async with app.router.lifespan_context(app):
        response = await Client(app).refused("/retrieve", {"queries": ["a"]})
    assert (response.status_code, response.headers.get("Retry-After")) == (status, retry_after)
    assert response.json() == {"detail": str(error)}
    assert searches.closed


def test_a_port_that_is_taken_is_named(index_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port: cannot listen on 127.0.0.1:{port}"):
            serve(Failing(RuntimeError()), index_folder, "127.0.0.1", port)


class Cold(Failing):
    """Searches that cannot be warmed up."""

    async def warm_up(self) -> None:
        raise self.error


def test_a_model_that_does_not_load_ends_the_server_with_its_own_error(index_folder: Path) -> None:
    searches = Cold(SearchFailed("the model does not load", "retrieval"))
    with pytest.raises(SearchFailed, match="the model does not load"):
        serve(searches, index_folder, "127.0.0.1", 0)
    assert searches.closed


def test_the_command_serves_until_it_is_told_to_stop(index_folder: Path) -> None:
    words = [sys.executable, "-m", "retrieval_index", "serve", "--index", str(index_folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[-1]
            reply = httpx.post(url, json={"queries": ["mentor Boko"], "topk": 1}, timeout=60).json()
            assert reply["result"][0][0]["contents"] == contents("mentor-Boko")
            server.terminate()
            assert server.wait(30) == -signal.SIGTERM  # uvicorn ends in order, then gives the signal back
        finally:
            server.kill()
