"""A run's searches, recorded by several processes, merged, and replayed without an index."""

import asyncio

import numpy as np
import pyarrow as pa
import pytest

from mempo_ray.actors.search import SearchClient, record_file
from mempo_ray.actors.search_record import Recorder, Replay, merge_record, parts_of, read_record
from mempo_ray.actors.search_shared import SharedSearch
from mempo_ray.agent.episode import run_episode
from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.protocol import write_turn
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.agent.tools import Services, Toolbox
from mempo_ray.config.load import build
from mempo_ray.config.schema import Agent, Retrieval, Rollout
from mempo_ray.contracts import EpisodeRequest, Passage, Task
from mempo_ray.errors import ConfigError, DataError, ToolFailed
from mempo_ray.preflight import check_retrieval
from tests.fakes.generate import ScriptedGenerate
from tests.fakes.search import FakeSearch
from tests.fakes.tokenizer import byte_level_folder

FACTS = {
    "mentor Boko": [Passage("p1", "Boko", "mentor Boko Sari .", 0.75), Passage("p2", "Vela", "é \u4e2d .", 0.1)],
    "boss Sari": [Passage("p3", "Sari", "boss Sari Kim .", 0.5)],
    "nothing": [],
}


@pytest.fixture
def record(tmp_path):
    return tmp_path / "searches.arrow"


async def test_what_two_processes_recorded_is_one_file_and_answers_as_the_search_did(record):
    one, two = (Recorder(FakeSearch(FACTS), record) for _ in range(2))
    await one(["mentor Boko", "nothing"], 3)
    await two(["boss Sari", "mentor Boko"], 3)
    merge_record(record, "index-1")
    assert not parts_of(record).exists()
    replay = Replay(record)
    assert await replay(["boss Sari", "mentor Boko", "nothing"], 3) == [
        FACTS[q] for q in ("boss Sari", "mentor Boko", "nothing")
    ]
    table = pa.ipc.open_file(str(record)).read_all()
    assert table.column_names == ["query", "top_k", "passages", "index_id"]
    assert table["query"].to_pylist() == ["boss Sari", "mentor Boko", "nothing"]
    assert set(table["index_id"].to_pylist()) == {"index-1"}


async def test_a_query_that_is_not_in_the_record_is_an_error_that_names_it(record):
    await Recorder(FakeSearch(FACTS), record)(["mentor Boko"], 3)
    merge_record(record, "i")
    replay = Replay(record)
    with pytest.raises(
        DataError, match=r"retrieval\.record: .*searches\.arrow holds no search for 'boss Sari' with k=3"
    ):
        await replay(["boss Sari"], 3)
    with pytest.raises(DataError, match="'mentor Boko' with k=2"):
        await replay(["mentor Boko"], 2)


async def test_a_search_asked_again_is_the_one_that_was_written(record):
    """So a record holds what every episode saw, though an index may round otherwise in another batch."""
    search = FakeSearch(FACTS)
    recorder = SharedSearch(Recorder(search, record))
    first = await recorder(["mentor Boko", "mentor Boko"], 3)
    assert first == await recorder(["mentor Boko"] * 2, 3) == [FACTS["mentor Boko"]] * 2
    assert search.queries == ["mentor Boko"]
    assert len(read_record(record)) == 1


async def test_equal_queries_side_by_side_see_the_same_passages(record):
    answers = [[Passage("a", "", "first")], [Passage("b", "", "second")]]

    async def other_each_time(queries, top_k):
        return [answers.pop()]

    recorder = SharedSearch(Recorder(other_each_time, record))
    one, two = await asyncio.gather(recorder(["q"], 1), recorder(["q"], 1))
    assert one == two == await Replay(record)(["q"], 1)


async def test_a_failed_search_is_not_recorded(record):
    recorder = Recorder(FakeSearch(FACTS, num_failures=1), record)
    with pytest.raises(ToolFailed):
        await recorder(["mentor Boko"], 3)
    assert not parts_of(record).exists()
    await recorder(["mentor Boko"], 3)
    assert len(read_record(record)) == 1


async def test_a_process_that_died_while_writing_loses_only_that_search(record, caplog):
    await Recorder(FakeSearch(FACTS), record)(["mentor Boko"], 3)
    await Recorder(FakeSearch(FACTS), record)(["nothing"], 3)
    (part,) = [p for p in parts_of(record).iterdir() if b"mentor" in p.read_bytes()]
    whole = part.read_bytes()
    for kept in range(len(whole) - 1, 0, -97):
        part.write_bytes(whole[:kept])
        assert [FACTS["nothing"]] == await Replay(record)(["nothing"], 3)
    assert "ends in the middle of a search" in caplog.text


async def test_a_resumed_run_adds_to_the_record_and_its_index_has_its_own_name(record):
    await Recorder(FakeSearch(FACTS), record)(["mentor Boko"], 3)
    merge_record(record, "index-1")
    await Recorder(FakeSearch(FACTS), record)(["boss Sari"], 3)
    assert len(await Replay(record)(["mentor Boko", "boss Sari"], 3)) == 2, "unmerged parts are read as well"
    merge_record(record, "index-2")
    merge_record(record, "nothing to merge")
    assert dict(zip(*(read_record(record)[name].to_pylist() for name in ("query", "index_id")), strict=True)) == {
        "mentor Boko": "index-1", "boss Sari": "index-2"}  # fmt: skip


async def test_a_recorder_keeps_nothing_in_memory_and_its_record_the_first_of_what_it_wrote(record, caplog):
    answers = [[Passage("a", "", "first")], [Passage("b", "", "second")]]

    async def other_each_time(queries, top_k):
        return [answers.pop(0)]

    recorder = SharedSearch(Recorder(other_each_time, record), max_kept=0)
    (first,), _ = await recorder(["q"], 1), await recorder(["q"], 1)
    merge_record(record, "i")
    assert await Replay(record)(["q"], 1) == [first]
    assert "1 queries found different passages when they were asked again" in caplog.text


async def test_processes_that_found_different_passages_are_reported(record, caplog):
    await Recorder(FakeSearch(FACTS), record)(["mentor Boko"], 3)
    await Recorder(FakeSearch({"mentor Boko": FACTS["boss Sari"]}), record)(["mentor Boko"], 3)
    merge_record(record, "i")
    assert "or by two processes, such as 'mentor Boko'" in caplog.text
    assert len(read_record(record)) == 1


@pytest.mark.parametrize("damage", [b"", b"not arrow", None])
def test_a_record_that_is_missing_or_damaged_is_found_by_the_preflight(record, damage):
    if damage is not None:
        record.write_bytes(damage)
    with pytest.raises(DataError, match=r"retrieval\.record: .*searches\.arrow"):
        check_retrieval(build({"retrieval": {"mode": "replay", "record": str(record)}}))


def test_modes_name_the_key_that_they_need():
    with pytest.raises(ConfigError, match=r"retrieval\.record"):
        build({"retrieval": {"mode": "replay"}})
    with pytest.raises(ConfigError, match=r"retrieval\.url"):
        build({"retrieval": {"backend": "http", "url": "localhost:8000"}})


def test_the_record_lies_in_the_run_folder_unless_told_otherwise(tmp_path):
    assert record_file(Retrieval(), tmp_path) is None
    assert record_file(Retrieval(mode="record"), tmp_path) == tmp_path / "searches.arrow"
    assert record_file(Retrieval(mode="replay", record="/x/y.arrow"), tmp_path).name == "y.arrow"


async def test_a_replayed_episode_has_the_same_tool_tokens_in_every_turn(tmp_path, record):
    """Done-when 6, on one episode: real renderer and tokenizer, no index the second time."""
    folder = byte_level_folder(tmp_path / "model")
    renderer = Renderer.from_folder(folder, FileTokenizer.from_folder(folder), Agent())
    lines = [write_turn("nothing", "look", search=query) for query in ("mentor Boko", "boss Sari", "mentor Boko")]
    lines.append(write_turn("boss Sari Kim .", "done", answer="Kim"))
    request = EpisodeRequest(Task("q1", "boss of mentor Boko ?", (("Kim",),), "test"), sibling=0, seed=7)

    async def play(search):
        return await run_episode(
            request,
            generate=ScriptedGenerate(renderer.tokenizer, lines),
            tools=Toolbox(Agent(top_k=3), Services(search)),
            renderer=renderer,
            agent=Agent(top_k=3),
            rollout=Rollout(),
        )

    recorded = await play(SharedSearch(Recorder(FakeSearch(FACTS), record)))
    merge_record(record, "i")
    replayed = await play(SearchClient(Retrieval(mode="replay", record=str(record)), 1.0, record))
    assert len(replayed.turns) == 4
    assert sum(len(turn.tool_ids) > 0 for turn in replayed.turns) == 3
    for one, two in zip(recorded.turns, replayed.turns, strict=True):
        assert (one.tool_text, one.passage_ids) == (two.tool_text, two.passage_ids)
        np.testing.assert_array_equal(one.tool_ids, two.tool_ids)
        np.testing.assert_array_equal(one.prompt_ids, two.prompt_ids)
