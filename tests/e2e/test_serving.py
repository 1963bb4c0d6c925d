"""`mempo-ray sft`, `eval` and `ask`: from nothing to an answer, as a person types it."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from mempo_ray.config.load import load_config
from mempo_ray.errors import ConfigError, InfrastructureError
from mempo_ray.observability.progress import PlainDisplay
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.serving import kept_where_it_fails, served_config, served_model, tasks_of

QUESTION = "boss Meli and home Lane ?"
MANIFEST = Path("index") / "manifest.json"


def mempo_ray(*words: str) -> str:
    """stdout of a command that must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "mempo_ray.cli", *words], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_cold_started_model_is_evaluated_and_asked(tmp_path) -> None:
    runs = f"run.dir={tmp_path / 'runs'}"
    model = Path(mempo_ray("sft", runs, "cold_start.tasks=16").splitlines()[-1])
    assert (model / "model.safetensors").is_file()
    checkpoint = str(model.parent)

    rows = [("a", QUESTION, "Puga Supi", "two"), ("b", "office Nehi and boss of baker Vupo ?", "Namu Leha", "three")]
    data = tmp_path / "dev.jsonl"
    lines = [
        json.dumps({"id": name, "question": question, "golden_answers": [answer], "data_source": source})
        for name, question, answer, source in rows
    ]
    data.write_text("\n".join(lines))
    read = json.loads(mempo_ray("eval", "--checkpoint", checkpoint, "--data", str(data), "--json", "-"))
    assert {name: row["num_questions"] for name, row in read["results"].items()} == {"three": 1, "two": 1, "all": 2}

    shown = mempo_ray("ask", "--checkpoint", checkpoint, QUESTION)
    assert shown.startswith(f"question: {QUESTION}")
    assert "turn 1" in shown


def run_with_checkpoint(root: Path) -> Path:
    checkpoint = root / "checkpoints" / "step_000003"
    (checkpoint / "hf").mkdir(parents=True)
    for file in ("facts.json", "COMPLETE", "hf/config.json"):
        (checkpoint / file).write_text("{}")
    (root / "index").mkdir()
    (root / MANIFEST).write_text("{}")
    (root / "config.yaml").write_text("run: {name: mine}\nagent: {max_turns: 7}\n")
    return checkpoint


def test_a_checkpoint_brings_the_configuration_and_the_index_of_its_run(tmp_path) -> None:
    checkpoint = run_with_checkpoint(tmp_path / "mine-1")
    config = served_config(checkpoint, None, ["agent.top_k=2"])
    assert config.policy.model == str(checkpoint / "hf")
    assert (config.agent.max_turns, config.agent.top_k) == (7, 2)
    assert config.retrieval.index == str(tmp_path / "mine-1" / "index")


def test_who_names_another_corpus_does_not_get_the_index_of_the_run(tmp_path) -> None:
    checkpoint = run_with_checkpoint(tmp_path / "mine-1")
    assert served_config(checkpoint, None, ["retrieval.corpus=wiki.jsonl"]).retrieval.index == ""


def test_a_bare_hugging_face_folder_is_served_under_the_quickstarts_configuration(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert served_config(tmp_path / "model", None, []).run.name == "quickstart"


def test_an_interrupted_checkpoint_and_an_empty_folder_are_refused(tmp_path) -> None:
    checkpoint = run_with_checkpoint(tmp_path / "mine-1")
    (checkpoint / "COMPLETE").unlink()
    with pytest.raises(ConfigError, match="incomplete checkpoint"):
        served_model(checkpoint)
    with pytest.raises(ConfigError, match=r"neither a run with a complete checkpoint, .* nor a Hugging Face folder"):
        served_model(tmp_path)


def test_a_run_folder_stands_for_its_newest_complete_checkpoint(tmp_path) -> None:
    newest = run_with_checkpoint(tmp_path / "mine-1")
    for step, is_complete in (("000002", True), ("000004", False)):
        shutil.copytree(newest, newest.parent / f"step_{step}")
        if not is_complete:
            (newest.parent / f"step_{step}" / "COMPLETE").unlink()
    (tmp_path / "latest").symlink_to("mine-1")
    assert served_model(tmp_path / "latest") == newest / "hf"


def test_an_evaluation_reads_as_many_questions_as_eval_tasks_says_and_tells_what_it_left_out(tmp_path) -> None:
    data = tmp_path / "dev.jsonl"
    rows = [{"question": f"who {i} ?", "golden_answers": ["Sari"]} for i in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks, left_out = tasks_of(load_config(["eval.tasks=2"]), str(data))
    assert [task.question for task in tasks] == ["who 0 ?", "who 1 ?"]
    assert left_out == "the first 2 of 5 rows (eval.tasks)"
    tasks, left_out = tasks_of(load_config(["eval.tasks=5"]), str(data))
    assert (len(tasks), left_out) == (5, "")


@pytest.mark.parametrize(
    ("fails", "log", "stays"), [(False, "engine.log", False), (True, "engine.log", True), (True, None, False)]
)
def test_the_logs_of_a_command_stay_where_it_failed(tmp_path, fails: bool, log: str | None, stays: bool) -> None:
    folder, said = RunFolder.create(tmp_path, "ask", is_latest=False), []
    if log is not None:
        (folder.logs / log).write_text("no memory left")
    with pytest.raises(InfrastructureError) if fails else nullcontext():  # noqa: SIM117 (the outer one is of the test)
        with kept_where_it_fails(folder, PlainDisplay(0, said.append)):
            if fails:
                raise InfrastructureError("the engine died")
    assert folder.root.exists() == stays
    assert said == ([f"logs: {folder.logs}"] if stays else [])


@pytest.mark.parametrize("named", ["checkpoints", "checkpoints/step_000777"])
def test_a_folder_that_is_no_checkpoint_is_answered_with_those_of_the_run(tmp_path, named: str) -> None:
    checkpoint = run_with_checkpoint(tmp_path / "mine-1")
    with pytest.raises(ConfigError, match=f"; there is {re.escape(str(checkpoint))}$"):
        served_model(tmp_path / "mine-1" / named)
