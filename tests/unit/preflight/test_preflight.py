"""The checks before a run, one by one; the messages as a person sees them are in tests/e2e/test_bad_input.py."""

import json
import re

import numpy as np
import pytest

from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.load import build
from mempo_ray.config.models import model_folder
from mempo_ray.contracts import Task
from mempo_ray.data.tasks import TaskSource
from mempo_ray.errors import ConfigError, DataError
from mempo_ray.placement.plan import folder_roles
from mempo_ray.preflight import (
    check_cold_start,
    check_names,
    check_probes,
    check_resume,
    check_retrieval,
    check_run_folder,
    check_token_limits,
    check_vocabulary,
    context_tokens,
    preflight,
)
from mempo_ray.rewards.sandbox import local
from mempo_ray.rewards.sandbox.levels import Level
from tests.fakes.tokenizer import byte_level_folder

LIMITS = {"turn_tokens": 100, "tool_tokens": 50, "episode_tokens": 1000}


def run(**sections):
    return build({"agent": {"limits": LIMITS, "max_turns": 5, **sections.pop("agent", {})}, **sections})


@pytest.mark.parametrize(
    ("agent", "tokens"),
    [
        ({"context": "last_turn"}, 150),
        ({"context": "memory_only"}, 150),
        ({"context": "k_turns", "k_turns": 3}, 450),
        ({"context": "full"}, 600),
        ({"context": "full", "max_turns": 50}, 1000),
    ],
)
def test_what_a_prompt_can_hold_follows_from_the_context_mode(agent, tokens):
    assert context_tokens(run(agent=agent))[0] == tokens


def test_the_sum_that_does_not_fit_is_spelled_out():
    with pytest.raises(ConfigError) as caught:
        check_token_limits(run(rollout={"max_model_len": 250}), initial_tokens=20)
    assert "20 (longest system message and question) + 100" in str(caught.value)
    assert "= 270 tokens" in str(caught.value)
    check_token_limits(run(rollout={"max_model_len": 270}), initial_tokens=20)


def test_concatenated_rows_need_a_budget_for_a_whole_episode():
    sections = {"rollout": {"max_model_len": 300}, "policy": {"micro_batch_tokens": 300}}
    check_token_limits(run(**sections))
    with pytest.raises(ConfigError, match="rows of 750 tokens"):
        check_token_limits(run(**sections, algorithm={"rows": "concatenated"}))


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(**row): ...",
        "async def compute_score(**row): ...",
        "from rewards import compute_score",
        "from rewards import judge as compute_score",
        "compute_score = print",
        "if True:\n    def other(): ...\n    compute_score = other",
    ],
)
def test_a_custom_function_may_be_defined_assigned_or_imported(tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    check_names(run(reward={"custom_function": {"path": str(tmp_path / "mine.py")}}))


def test_a_custom_function_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    (tmp_path / "mine.py").write_text("def score_it(): ...\ndef helper():\n    def compute_score(): ...")
    with pytest.raises(ConfigError, match=r"has no function 'compute_score'; it has score_it, helper\."):
        check_names(run(reward={"custom_function": {"path": str(tmp_path / "mine.py")}}))


@pytest.mark.parametrize(
    ("memory_reward", "fits"),
    [({}, False), ({"weight": 0}, True), ({"baseline": "none"}, True), ({"max_history_tokens": 500}, True)],
)
def test_a_full_history_must_fit_into_a_scoring_batch_where_it_is_scored(memory_reward, fits):
    config = run(batch_executor={"micro_batch_tokens": 600}, memory_reward=memory_reward)
    if fits:
        check_token_limits(config)
    else:
        with pytest.raises(ConfigError, match="full history of 750 tokens"):
            check_token_limits(config)


def test_a_tracker_that_is_misspelt_or_not_installed_is_named():
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        check_names(build({"trackers": ["wandbb"]}))
    with pytest.raises(ConfigError, match=r"dvclive needs the package dvclive, .* pip install dvclive"):
        check_names(build({"trackers": ["dvclive"]}))


def test_a_cold_start_needs_a_task_with_hops_unless_the_run_goes_on():
    hops = {"chain": [["mentor", "Boko", "Sari", "p1"]]}
    own, synthetic = (Task("t", "?", (("a",),), "own", metadata) for metadata in ({}, hops))
    wanted = {"cold_start": {}}
    with pytest.raises(ConfigError, match=r"cold_start: no task of .* holds hops .*cold_start=null"):
        check_cold_start(build(wanted), [own])
    check_cold_start(build(wanted), [own, synthetic])
    check_cold_start(build(wanted | {"run": {"resume": "auto"}}), [own])
    check_cold_start(build({}), [own])


def test_probes_need_a_held_out_task_with_hops():
    hops = {"chain": [["mentor", "Boko", "Sari", "p1"]]}
    own, synthetic = (Task("t", "?", (("a",),), "own", metadata) for metadata in ({}, hops))
    wanted = build({"eval": {"probe_ratios": True, "tasks": 1}})
    with pytest.raises(ConfigError, match=r"eval\.probe_ratios: none of the first 1 tasks.*eval\.probe_ratios=false"):
        check_probes(wanted, [own, synthetic])
    check_probes(wanted, [synthetic, own])
    check_probes(build({}), [own])


def _corpus(tmp_path, rows=3):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": str(i), "title": "", "text": "t"}) + "\n" for i in range(rows)))
    return file


@pytest.mark.parametrize(
    ("shape", "words"), [((3, 256), "dimension 256, the encoder 'hash' makes 512"), ((2, 512), "has 2 rows")]
)
def test_prepared_embeddings_must_fit_encoder_and_corpus(tmp_path, shape, words):
    np.save(tmp_path / "e.npy", np.zeros(shape, np.float16))
    retrieval = {"corpus": str(_corpus(tmp_path)), "embeddings": str(tmp_path / "e.npy")}
    with pytest.raises(DataError, match=words):
        check_retrieval(build({"retrieval": retrieval}))
    np.save(tmp_path / "e.npy", np.zeros((3, 512), np.float16))
    check_retrieval(build({"retrieval": retrieval}))


def test_files_of_questions_do_not_search_the_synthetic_world():
    with pytest.raises(ConfigError, match=r"retrieval\.corpus"):
        check_retrieval(build({"data": {"train": "own.jsonl"}}))


def test_a_broken_line_of_the_corpus_is_named(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text("not json\n")
    with pytest.raises(DataError, match=r"retrieval\.corpus"):
        check_retrieval(build({"retrieval": {"corpus": str(file)}}))


def test_questions_of_words_that_the_policy_does_not_know_are_refused():
    asked, own = (Task(text, text, (("a",),), "own") for text in ("mentor Boko and home Vela ?", "Who directed Jaws ?"))
    config, tiny = build({"data": {"eval": "own.jsonl"}}), FileTokenizer.from_folder(model_folder("builtin:tiny"))
    check_vocabulary(config, tiny, "train", [asked])
    with pytest.raises(ConfigError, match=r"policy\.model: .*data\.eval=own\.jsonl: .*3 of 4 tokens.*mempo-ray fetch"):
        check_vocabulary(config, tiny, "eval", [own])


def test_a_byte_level_policy_can_read_every_question(tmp_path):
    tokenizer = FileTokenizer.from_folder(byte_level_folder(tmp_path))
    check_vocabulary(build({}), tokenizer, "train", [Task("t", "Wer drehte „Shoah“ ?", (("a",),), "own")])


def test_auto_resume_without_a_checkpoint_is_a_new_run(tmp_path):
    check_resume(build({"run": {"resume": "auto", "dir": str(tmp_path)}}), tmp_path, TASKS)


TASKS = [Task(f"t{n}", "?", (("a",),), "own") for n in range(8)]


@pytest.fixture
def checkpoint(tmp_path):
    """Of a run of 8 tasks, 3 a step, 2 siblings each, after its first step; with the model's config.json beside it."""
    source = TaskSource(TASKS, seed=5)
    source.next(3)
    state = source.state()
    following = [[task.task_id, sibling, 0] for task in source.next(3) for sibling in range(2)]
    architecture = {"hidden_size": 8, "num_key_value_heads": 2, "model_type": None}
    facts = {"architecture": architecture, "extra": {"source": state, "next": following}}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (tmp_path / "COMPLETE").touch()
    return tmp_path


def resuming(checkpoint, seed=5, group_size=2, **data):
    run, data = {"resume": str(checkpoint), "seed": seed}, {"tasks_per_step": 3, **data}
    return build({"run": run, "data": data, "algorithm": {"group_size": group_size}})


def test_a_checkpoint_of_the_same_model_and_run_is_accepted_whatever_config_json_leaves_out(checkpoint):
    check_resume(resuming(checkpoint), checkpoint, TASKS)


@pytest.mark.parametrize(
    ("changed", "tasks", "words"),
    [
        ({"seed": 6}, TASKS, ["run.seed was 5, is now 6."]),
        ({"tasks_per_step": 4}, TASKS, ["data.tasks_per_step was 3, is now 4."]),
        ({"train": "own.jsonl"}, TASKS[:7], ["data.train was of 8 tasks, is now own.jsonl of 7."]),
        ({"shuffle": False}, TASKS, ["data.train or data.shuffle was 't", "' next."]),
        ({"seed": 6, "group_size": 4}, TASKS, ["run.seed was 5, is now 6; algorithm.group_size was 2, is now 4."]),
    ],
)
def test_a_resume_that_does_not_fit_names_each_key_with_both_values(checkpoint, changed, tasks, words):
    with pytest.raises(ConfigError) as caught:
        check_resume(resuming(checkpoint, **changed), checkpoint, tasks)
    for text in [*words, "or start anew with run.resume=''."]:
        assert text in str(caught.value)


def test_where_the_weights_are_exported_a_new_run_can_start_from_them(checkpoint):
    (checkpoint / "hf").mkdir()
    with pytest.raises(ConfigError, match=rf"start anew from its weights with policy\.model={checkpoint}/hf"):
        check_resume(resuming(checkpoint, seed=6), checkpoint, TASKS)


def test_the_run_folder_may_be_a_uri(tmp_path):
    check_run_folder(build({"run": {"dir": f"file://{tmp_path}/runs"}}))
    with pytest.raises(ConfigError, match=r"run\.dir"):
        check_run_folder(build({"run": {"dir": "nofs://bucket/runs"}}))


def test_a_dry_run_tells_what_is_missing_in_place_of_failing(tmp_path):
    sections = {"policy": {"model": str(tmp_path / "none")}, "run": {"dir": str(tmp_path / "runs")}}
    checked = preflight(build(sections), dry_run=True)
    told = checked.describe()
    assert (
        told.index("Configuration:") < told.index("Plan:") < told.index("no model folder")
    )  # what counts stays in view
    assert checked.exit_code == 2
    with pytest.raises(ConfigError):
        preflight(build(sections))
    shape = tmp_path / "shape.yaml"
    shape.write_text("nodes: [{cpus: 4}]")
    elsewhere = build({**sections, "placement": {"cluster_shape": str(shape)}})
    assert preflight(elsewhere, dry_run=True).exit_code == 0


def test_the_defaults_fit_each_other():
    check_token_limits(build({}), initial_tokens=1000)


WEAK = (Level.RLIMITS, {Level.NAMESPACES_UID: "not installed: bwrap"})


def test_a_python_tool_on_a_machine_without_a_sandbox_is_refused_and_an_allowed_or_remote_one_is_not(monkeypatch):
    monkeypatch.setattr(local, "detect_level", lambda: WEAK)
    tools = {"tools": ["search", "python"]}
    with pytest.raises(ConfigError, match=r"reward\.sandbox\.allow_weak.*not installed: bwrap"):
        check_names(run(agent=tools))
    check_names(run(agent=tools, reward={"sandbox": {"allow_weak": True}}))
    check_names(run(agent=tools, reward={"sandbox": {"url": "http://sandbox/run_code"}}))
    check_names(run(agent=tools, placement={"address": "ray://elsewhere"}))
    check_names(run())


def test_a_call_of_the_python_tool_outlasts_its_program():
    reward = {"sandbox": {"allow_weak": True, "run_s": 10}}
    with pytest.raises(ConfigError, match=r"agent\.limits\.search_s: .* 30 s, .* 30 s \(3 · reward\.sandbox\.run_s\)"):
        check_names(run(agent={"tools": ["python"]}, reward=reward))
    check_names(run(agent={"tools": ["python"], "limits": {"search_s": 60}}, reward=reward))


def test_rows_of_programs_need_a_sandbox_too(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "detect_level", lambda: WEAK)
    tests = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "Echo.", "golden_answers": tests, "data_source": "taco"}) + "\n")
    config = run(data={"train": str(rows), "eval": str(rows)})
    with pytest.raises(ConfigError, match=r"reward\.sandbox\.allow_weak"):
        preflight(config)


def test_all_tests_of_a_program_must_fit_into_a_call_of_its_scorer(tmp_path):
    tests = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "Echo.", "golden_answers": tests, "data_source": "taco"}) + "\n")
    late = {"code_s": 30, "timeout_s": 30, "sandbox": {"allow_weak": True}}
    with pytest.raises(ConfigError, match=r"reward\.code_s: .* 30 s, .* reward\.timeout_s=30 s"):
        preflight(run(data={"train": str(rows), "eval": str(rows)}, reward=late))


def test_a_tool_reward_needs_a_tool():
    with pytest.raises(ConfigError, match=r"tool_weights: no tool 'serach' in this run; it has search"):
        check_names(run(reward={"tool_weights": {"serach": 0.1}}))


def test_a_tools_file_is_read_before_anything_starts(tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text("mcp_servers: [{name: a}]")
    with pytest.raises(ConfigError, match="either command or url"):
        check_names(run(agent={"tools_file": str(file)}))


def test_a_cold_start_teaches_one_form_of_calls():
    with pytest.raises(ConfigError, match=r"tool_parser: the cold start teaches calls as tags, not as 'hermes'"):
        check_names(run(agent={"tool_parser": "hermes"}, cold_start={}))
    check_names(run(agent={"tool_parser": "hermes"}))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"scorer": "exact_mach"}, "reward.scorer: unknown name 'exact_mach'"),
        ({"scorer": "custom_function"}, "reward.styles.x.scorer: custom_function needs reward.custom_function.path"),
        ({"style": "api", "judge": {"url": "http://j", "template": "none.jinja"}}, "none.jinja cannot be read"),
        ({"style": "model", "reward_model": {"folder": "/no/model"}}, "/no/model has no config.json"),
    ],
)
def test_what_a_part_of_a_hybrid_reward_names_must_be_there(part, words):
    with pytest.raises(ConfigError) as caught:
        check_names(run(reward={"manager": "hybrid", "styles": {"x": part}}))
    assert words in str(caught.value)


def test_a_uri_over_several_nodes_needs_a_local_folder_that_they_share_and_the_dry_run_says_it(tmp_path, monkeypatch):
    shape = tmp_path / "shape.yaml"
    shape.write_text("nodes: [{count: 2, cpus: 0.6, name: small}, {cpus: 8, name: large}]")
    placement = {"cluster_shape": str(shape)}
    monkeypatch.delenv("MEMPO_LOCAL_RUNS", raising=False)

    def missing(**sections) -> str:
        at = {"dir": (tmp_path / "bucket").as_uri()}
        return preflight(run(run=at, placement=placement, **sections), dry_run=True).missing

    apart = {"retrieval": {"replicas": 3}}
    assert re.search(r"run\.dir: file://.* \(large, small 0, small 1\) share .* Set MEMPO_LOCAL_RUNS", missing(**apart))
    shape.write_text("nodes: [{cpus: 8}]")
    assert "run.dir" not in missing(**apart)
    shape.write_text("nodes: [{count: 2, cpus: 0.6, name: small}, {cpus: 8, name: large}]")
    monkeypatch.setenv("MEMPO_LOCAL_RUNS", str(tmp_path / "mounted"))
    assert "run.dir" not in missing(**apart)


def test_agent_workers_use_the_run_s_folder_where_they_record_their_searches_in_it():
    assert "agent_loop" not in folder_roles(run())
    assert "agent_loop" in folder_roles(run(retrieval={"mode": "record"}))
    assert "agent_loop" not in folder_roles(run(retrieval={"mode": "record", "record": "elsewhere/searches.arrow"}))
