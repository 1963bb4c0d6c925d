"""The retrieval actor as a Ray actor: searches of many callers, typed failures, and the index of a run."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from mempo_ray.actors.retrieval import RemoteRetrievalActor, RetrievalActor, index_id, prepare_index
from mempo_ray.actors.retrieval_pool import RetrievalPool
from mempo_ray.config.schema import Retrieval
from mempo_ray.contracts import Passage
from mempo_ray.data.world import AtlasSpec, build_atlas
from mempo_ray.errors import ConfigError, DataError, DeadlineExceeded, ToolFailed
from retrieval_index.build import build_index
from retrieval_index.encoder import HashEncoder
from retrieval_index.errors import EncoderError, ServeError
from retrieval_index.server import make_app, serve
from retrieval_index.service import RetrievalService, ServiceLimits
from retrieval_index.serving_pool import OpenService, ReplicaPool

SYNTHETIC = Retrieval(corpus="synthetic", encoder="hash", max_wait_s=0)
PATIENCE_S = 60


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    return list(build_atlas(AtlasSpec()).passages())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, passages: list[Passage]) -> Path:
    return prepare_index(SYNTHETIC, passages, tmp_path_factory.mktemp("run") / "index")


async def test_each_fact_of_the_synthetic_worlds_is_found_first_before_distractors_that_share_a_word(
    folder: Path, passages: list[Passage]
) -> None:
    actor = RetrievalActor(SYNTHETIC, str(folder), PATIENCE_S)
    await actor.ping()
    queries = [" ".join(passage.text.split()[:2]) for passage in passages]
    found = await actor.search(queries, 3)
    assert [result[0].id for result in found] == [passage.id for passage in passages]
    sharing = [
        bool(set(q.split()) & set(p.text.split())) for q, result in zip(queries, found, strict=True) for p in result
    ]
    assert sum(sharing) >= 0.99 * len(sharing)
    stats = await actor.stats()
    assert stats["queries"] == len(queries) + 1, "the facts, and one to warm up"
    await actor.close()
    with pytest.raises(ToolFailed):
        await actor.search(queries[:1], 3)


async def test_a_query_that_cannot_be_searched_finds_nothing_and_spoils_nothing(folder: Path) -> None:
    actor = RetrievalActor(SYNTHETIC, str(folder), PATIENCE_S)
    empty, good, over_long = await actor.search(["", "mentor", "x" * 100_000], 2)
    assert (empty, len(good), over_long) == ([], 2, [])
    await actor.close()


async def test_a_search_takes_no_longer_than_the_agent_s_limit_for_one(folder: Path) -> None:
    waits_for_company = SYNTHETIC.model_copy(update={"max_wait_s": PATIENCE_S})
    actor = RetrievalActor(waits_for_company, str(folder), search_s=0.01)
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        await actor.search(["mentor Boko"], 1)
    await actor.close()


def test_a_resumed_run_uses_its_index_again_until_an_input_changes(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "a", "title": "Boko", "text": "mentor Boko Sari ."}) + "\n")
    settings = Retrieval(corpus=str(corpus), encoder="hash")
    manifest = prepare_index(settings, (), tmp_path / "index") / "manifest.json"
    built = manifest.stat().st_mtime_ns
    prepare_index(settings, (), tmp_path / "index")
    assert manifest.stat().st_mtime_ns == built
    corpus.write_text(json.dumps({"id": "b", "title": "Vela", "text": "judge Vela Kim ."}) + "\n")
    prepare_index(settings, (), tmp_path / "index")
    assert manifest.stat().st_mtime_ns != built


def test_a_run_that_ends_before_it_has_an_index_searched_nothing(tmp_path: Path) -> None:
    assert index_id(Retrieval(), tmp_path / "index") == ""


def test_bad_input_names_the_key_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^retrieval\.corpus: there is no file"):
        prepare_index(Retrieval(corpus="absent.jsonl", encoder="hash"), (), tmp_path / "index")
    with pytest.raises(ConfigError, match=r"^retrieval\.index: there is no index at"):
        prepare_index(Retrieval(index=str(tmp_path / "absent")), (), tmp_path / "index")
    build_index([Passage("a", "", "x")], HashEncoder(64), "flat", tmp_path / "other")
    manifest = tmp_path / "other" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(HashEncoder(64).fingerprint, "0" * 64))
    with pytest.raises(ConfigError, match=r"^retrieval\.encoder: .* built with another encoder"):
        prepare_index(Retrieval(index=str(tmp_path / "other"), encoder="hash"), (), tmp_path / "index")
    with pytest.raises(ConfigError, match=r"^retrieval\.encoder: cannot read"):
        prepare_index(SYNTHETIC.model_copy(update={"encoder": str(tmp_path / "no")}), (), tmp_path / "index")


@pytest.mark.parametrize("kind", ["bm25", "hybrid"])
async def test_the_index_of_a_run_may_be_of_another_kind(tmp_path: Path, passages: list[Passage], kind: str) -> None:
    settings = SYNTHETIC.model_copy(update={"kind": kind})
    actor = RetrievalActor(settings, str(prepare_index(settings, passages, tmp_path / "index")), PATIENCE_S)
    fact = passages[7]
    (found,) = await actor.search([fact.text], 3)
    assert found[0].id == fact.id
    await actor.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_replica_that_is_killed_amid_searches_fails_none_of_them_and_comes_back(
    cluster: None, folder: Path, passages: list[Passage]
) -> None:
    remote = RemoteRetrievalActor.options(num_cpus=0.1, max_restarts=-1)
    actors = [remote.remote(SYNTHETIC, str(folder), PATIENCE_S) for _ in range(2)]
    await asyncio.gather(*(actor.ping.remote() for actor in actors))
    pool = RetrievalPool(deadline_s=PATIENCE_S)
    pool.announce(dict(zip("ab", actors, strict=True)))
    queries = [" ".join(passage.text.split()[:2]) for passage in passages[:400]]
    searches = [asyncio.create_task(pool([query], 3)) for query in queries]
    await next(iter(asyncio.as_completed(searches)))
    ray.kill(actors[0], no_restart=False)
    found = await asyncio.gather(*searches)
    assert [result[0][0].id for result in found] == [passage.id for passage in passages[:400]]
    assert pool.num_failures >= 1
    await asyncio.wait_for(_until_it_answers(actors[0]), PATIENCE_S)
    assert (await pool.stats())["retrieval/num_replicas"] == 2
    for actor in actors:
        ray.kill(actor)


async def _until_it_answers(actor: ActorHandle) -> None:
    while True:
        try:
            await actor.ping.remote()
        except RayActorError:  # Ray still starts it
            continue
        return


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_replica_that_joins_in_the_middle_takes_its_share(
    cluster: None, folder: Path, passages: list[Passage]
) -> None:
    remote = RemoteRetrievalActor.options(num_cpus=0.1)
    actors = [remote.remote(SYNTHETIC, str(folder), PATIENCE_S) for _ in range(2)]
    await asyncio.gather(*(actor.ping.remote() for actor in actors))
    pool = RetrievalPool(deadline_s=PATIENCE_S)
    pool.announce({"a": actors[0]})
    queries = [" ".join(passage.text.split()[:2]) for passage in passages[:200]]
    await asyncio.gather(*(pool([query], 3) for query in queries[:100]))
    pool.announce(dict(zip("ab", actors, strict=True)))
    await asyncio.gather(*(pool([query], 3) for query in queries[100:]))
    counts = [(await actor.stats.remote())["queries"] - 1 for actor in actors]  # one to warm up
    assert sum(counts) == 200
    assert counts[1] > 20
    for actor in actors:
        ray.kill(actor)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_with_a_gpu_s_layout_the_encoder_is_a_child_of_the_actor_and_ends_with_it(
    cluster: None, folder: Path, passages: list[Passage]
) -> None:
    """`device: cuda` on a machine without one: the layout is the same, the index falls back to the CPU."""
    settings = SYNTHETIC.model_copy(update={"device": "cuda"})
    before = set(psutil.Process().children(recursive=True))
    actor = RemoteRetrievalActor.options(num_cpus=0.1).remote(settings, str(folder), PATIENCE_S)
    (found,) = await actor.search.remote([passages[7].text], 3)
    assert found[0].id == passages[7].id
    born = [child for child in set(psutil.Process().children(recursive=True)) - before]
    encoders = [child for child in born if "spawn_main" in " ".join(child.cmdline())]
    assert encoders
    ray.kill(actor)
    _, alive = await asyncio.to_thread(psutil.wait_procs, encoders, PATIENCE_S)
    assert alive == []


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_replicas_behind_the_server_s_pool_answer_while_one_dies(cluster: None, folder: Path) -> None:
    """`serve --ray`: retrieval_index's own pool, which knows nothing of this project."""
    limits = ServiceLimits(max_wait_s=0)
    pool = ReplicaPool(functools.partial(RetrievalService.open, folder, limits=limits), 2, PATIENCE_S)
    app = make_app(pool, folder)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=PATIENCE_S) as client:

            async def ask(number: int) -> int:
                body = {"queries": [f"mentor {number}", ""], "topk": 2}
                return (await client.post("/retrieve", json=body)).status_code

            assert await ask(0) == 200
            calls = [asyncio.create_task(ask(number)) for number in range(100)]
            await next(iter(asyncio.as_completed(calls)))
            ray.kill(pool.replicas["replica-0"], no_restart=False)
            assert set(await asyncio.gather(*calls)) == {200}
            assert (await client.get("/stats")).json()["queries"] > 0


def damaged() -> RetrievalService:
    raise EncoderError("the weights are damaged", "encoder")


def crashing() -> RetrievalService:
    os._exit(1)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("open_service", "error", "says"),
    [
        (damaged, EncoderError, "the weights are damaged"),
        (crashing, ServeError, "replicas: one died while it loaded: "),
    ],
)
def test_a_replica_that_cannot_load_ends_the_server_and_leaves_none(
    cluster: None, folder: Path, open_service: OpenService, error: type[Exception], says: str
) -> None:
    pool = ReplicaPool(open_service, 2, PATIENCE_S)
    with pytest.raises(error, match=says):
        serve(pool, folder, "127.0.0.1", 0)
    for replica in pool.replicas.values():
        with pytest.raises(RayActorError):
            ray.get(replica.counters.remote(), timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_many_callers_of_one_remote_replica_share_its_batches(
    cluster: None, folder: Path, passages: list[Passage]
) -> None:
    actor = RemoteRetrievalActor.options(num_cpus=0.1).remote(SYNTHETIC, str(folder), PATIENCE_S)
    ray.get(actor.ping.remote(), timeout=60)
    queries = [" ".join(passage.text.split()[:2]) for passage in passages[:300]]
    found = ray.get([actor.search.remote([query], 3) for query in queries], timeout=60)
    assert [result[0][0] for result in found] == [
        Passage(p.id, p.title, p.text, score=result[0][0].score) for p, result in zip(passages, found, strict=False)
    ]
    stats = ray.get(actor.stats.remote(), timeout=60)
    assert stats["batched_queries"] == 301
    assert stats["batches"] < 301
    ray.get(actor.close.remote(), timeout=60)
    with pytest.raises(ToolFailed):
        ray.get(actor.search.remote(["Boko"], 1), timeout=60)
