"""What every `ports.Search` does: the fake, a RetrievalActor's plain class over a real index, a pool of two of them,
the HTTP client of a real server, and a recorded run replayed."""

import asyncio

import httpx
import pytest

from mempo_ray.actors.retrieval import RetrievalActor, prepare_index
from mempo_ray.actors.retrieval_pool import RetrievalPool
from mempo_ray.actors.search_http import HttpSearch
from mempo_ray.actors.search_record import Recorder, Replay
from mempo_ray.config.schema import Retrieval
from mempo_ray.contracts import Passage
from mempo_ray.errors import InfrastructureError
from retrieval_index.server import make_app
from retrieval_index.service import RetrievalService
from tests.fakes.handle import FakeHandle
from tests.fakes.search import FakeSearch

FACTS = [Passage(f"p{n}", "", f"mentor {name} Sari .") for n, name in enumerate(("Boko", "Vela", "Kim"))]
QUERIES = [fact.text for fact in FACTS]


@pytest.fixture(params=["fake", "actor", "pool", "http", "replay"])
async def search(request, tmp_path):
    if request.param == "fake":
        yield FakeSearch({f.text: [f, *(o for o in FACTS if o is not f)] for f in FACTS})
        return
    settings = Retrieval()
    folder = prepare_index(settings, FACTS, tmp_path / "index")
    if request.param == "http":
        app = make_app(RetrievalService.open(folder), folder)
        async with app.router.lifespan_context(app):
            client = HttpSearch("http://here/retrieve", 60, transport=httpx.ASGITransport(app))
            yield client
            await client.close()
        return
    actors = [RetrievalActor(settings, str(folder), search_s=60) for _ in range(2)]
    if request.param == "actor":
        yield actors[0].search
    elif request.param == "pool":
        pool = RetrievalPool(deadline_s=60)
        pool.announce({f"retrieval-{i}": FakeHandle(actor) for i, actor in enumerate(actors)})
        yield pool
    else:
        recorder = Recorder(actors[0].search, tmp_path / "searches.arrow")
        for top_k in (1, 2, 3):
            await recorder(["", *QUERIES], top_k)
        yield Replay(tmp_path / "searches.arrow")
    for actor in actors:
        await actor.close()


async def test_one_list_per_query_in_order_best_first(search):
    found = await search(QUERIES[::-1], 2)
    assert [passages[0].id for passages in found] == ["p2", "p1", "p0"]


async def test_at_most_top_k_passages(search):
    for top_k in (1, 2, 3):
        (passages,) = await search([FACTS[0].text], top_k)
        assert len(passages) == top_k


async def test_no_query_no_result(search):
    assert await search([], 3) == []


async def test_a_query_for_nothing_finds_nothing_and_is_no_failure(search):
    nothing, something = await search(["", FACTS[0].text], 1)
    assert (nothing, [p.id for p in something]) == ([], ["p0"])


async def test_searches_side_by_side_do_not_mix(search):
    found = await asyncio.gather(*(search([fact.text], 1) for fact in FACTS * 10))
    assert [passages[0].id for (passages,) in found] == [fact.id for fact in FACTS * 10]


async def test_the_fake_fails_with_a_typed_error_as_often_as_told():
    search = FakeSearch(default=FACTS, num_failures=1)
    with pytest.raises(InfrastructureError):
        await search(["q"], 1)
    assert await search(["q"], 1) == [[FACTS[0]]]
