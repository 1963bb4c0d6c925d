"""A run whose searches were recorded is repeated without an index, and one that searches over HTTP finds the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fakes.driver_run import SMALL, DriverRun, adopted_orphans, drive, step_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = (*SMALL, "run.steps=1", "run.deterministic=true", "rollout.engine=fake", "run.name=replay")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """The folder of a run that recorded; two replicas and two agent workers write one record."""
    words = ("retrieval.mode=record", "retrieval.replicas=2", "agent.workers=2")
    return drive(tmp_path_factory.mktemp("recorded"), *WORDS, *words).folder


def turns(folder: Path) -> dict[tuple, tuple]:
    """(file, task, sibling, turn) → what the tool said: its text, its tokens and the passages."""
    found = {}
    for file in sorted((folder / "trajectories").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            key = file.name, row["task_id"], row["sibling"], row["turn"]
            found[key] = row["tool_text"], row["tool_ids"], row["passage_ids"], row["query"]
    return found


def test_the_record_is_one_file_that_holds_every_query_of_the_run(recorded):
    table = pa.ipc.open_file(str(recorded / "searches.arrow")).read_all()
    queries = {query for _, ids, _, query in turns(recorded).values() if len(ids)}  # a last turn's is not searched
    assert queries
    assert queries <= set(table["query"].to_pylist())
    assert len(set(table["index_id"].to_pylist())) == 1
    assert not (recorded / "searches.arrow.parts").exists()
    metrics = step_metrics(recorded, 1)
    assert metrics["retrieval/num_replicas"] == 2
    assert metrics["retrieval/queries"] > 0
    assert metrics["rollout/searches"] >= metrics["retrieval/queries"]


def test_a_replay_gives_the_same_tool_text_in_every_turn_and_starts_no_retrieval_actor(recorded, tmp_path):
    words = ("retrieval.mode=replay", f"retrieval.record={recorded / 'searches.arrow'}")
    replayed = drive(tmp_path, *WORDS, *words).folder
    assert turns(replayed) == turns(recorded)
    assert not (replayed / "index").exists()
    assert not [name for name in step_metrics(replayed, 1) if name.startswith("retrieval/")]


def test_a_query_that_is_not_in_the_record_ends_the_run_and_is_named(recorded, tmp_path):
    table = pa.ipc.open_file(str(recorded / "searches.arrow")).read_all()
    record = tmp_path / "short.arrow"
    with pa.OSFile(str(record), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.slice(1))
    missing = table["query"][0].as_py()
    words = ("retrieval.mode=replay", f"retrieval.record={record}")
    with adopted_orphans(), DriverRun(tmp_path / "runs", *WORDS, *words) as run:
        assert run.finish() == 2, run.output
        assert run.left_behind == []
    assert "retrieval.record" in run.output
    assert repr(missing) in run.output.replace("\n", " ")


def test_a_server_over_the_same_index_finds_the_same(recorded, tmp_path):
    index = shutil.copytree(recorded / "index", tmp_path / "index")
    words = [sys.executable, "-m", "retrieval_index", "serve", "--index", str(index), "--port", "0", "--threads", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[-1]
            over_http = drive(tmp_path / "runs", *WORDS, "retrieval.backend=http", f"retrieval.url={url}").folder
        finally:
            server.terminate()
            server.wait(30)
    assert turns(over_http) == turns(recorded)
