"""From files and words to a frozen configuration."""

import re
from pathlib import Path

import pytest
import yaml

from mempo_ray.config.load import (
    QUICKSTART,
    VERL_KEYS,
    build,
    load_config,
    load_file,
    parse_command_line,
    resolved_yaml,
)
from mempo_ray.config.reference import fields, known_as, markdown
from mempo_ray.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_no_arguments_are_the_embedded_quickstart():
    assert load_config([]) == load_file(QUICKSTART)
    assert (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8") == QUICKSTART.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda f: f.name)
def test_every_shipped_file_loads(file):
    load_file(file)


def test_words_come_on_top_of_the_file_with_their_types():
    config = load_config(
        ["rollout.replicas=1", "policy.lr=1e-5", "trackers=[tensorboard]", "run.name=7", "data.shuffle=no"]
    )
    assert config.policy.lr == 1e-5
    assert config.trackers == ("tensorboard",)
    assert config.run.name == "7"
    assert config.data.shuffle is False


def test_a_section_can_be_removed_and_one_of_its_keys_set():
    assert load_config(["cold_start=null"]).cold_start is None
    assert load_config(["cold_start.epochs=3"]).cold_start.epochs == 3


def test_a_word_without_a_value_is_the_empty_text():
    assert load_config(["data.train="]).data.train == ""


def test_the_environment_is_read_where_the_file_says_so(monkeypatch, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: {train: '${oc.env:SOME_FOLDER,elsewhere}/train.jsonl'}")
    assert load_file(file).data.train == "elsewhere/train.jsonl"
    monkeypatch.setenv("SOME_FOLDER", "here")
    assert load_file(file).data.train == "here/train.jsonl"


def test_the_resolved_configuration_reads_back_equal(tmp_path):
    config = load_config(["algorithm.group_size=3", "policy.betas=[0.8,0.9]", "data.train=[a.parquet,b.jsonl]"])
    file = tmp_path / "resolved.yaml"
    file.write_text(resolved_yaml(config))
    assert load_file(file) == config


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("data.train_batch_size", "data.tasks_per_step"),
        ("+trainer.logger", "trackers"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_reward_coef"),
    ],
)
def test_a_key_of_verl_is_told_its_name_here(key, ours):
    with pytest.raises(ConfigError) as caught:
        load_config([f"{key}=1"])
    assert str(caught.value).startswith(f"{key}: a key of verl, here {ours}.")


def test_every_translation_leads_from_an_unknown_key_to_a_known_one_as_the_page_says():
    page = (ROOT / "docs" / "migrating-from-verl.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    for verl, ours in VERL_KEYS.items():
        assert known_as(verl) is None
        assert known_as(ours) == ours
        name, our_name = verl.rpartition(".")[2], ours.rpartition(".")[2]
        assert any(re.search(rf"\b{name}`", left) and re.search(rf"\b{our_name}`", right) for left, right in rows), verl


@pytest.mark.parametrize("key", ["actor_rollout_ref.rollout.mode", "trainer.nnodes", "+critic.optim.lr"])
def test_another_key_of_verl_leads_to_the_table_of_names(key):
    with pytest.raises(ConfigError, match=r"a key of verl.*docs/migrating-from-verl\.md"):
        load_config([f"{key}=1"])


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("temperature", "rollout.temperature"),
        ("rollout.group_size", "algorithm.group_size"),
        ("rolout.replicas", "rollout.replicas"),
        ("agent.limits.turn_token", "agent.limits.turn_tokens"),
        ("cold_start.epocs", "cold_start.epochs"),
        ("x", ""),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(key, nearest):
    with pytest.raises(ConfigError) as caught:
        load_config([f"{key}=1"])
    assert f"{key}: unknown configuration key. Did you mean {nearest}" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rollout.replicas=two", "rollout.replicas: got 'two', expected a whole number ≥ 1"),
        ("algorithm.group_size=0", "algorithm.group_size: got 0, expected a whole number ≥ 1"),
        (
            "memory_reward.gate=never",
            "memory_reward.gate: got 'never', expected one of: always, success_only",
        ),
        ("rollout.top_p=1.5", "rollout.top_p: got 1.5, expected a number > 0 and ≤ 1"),
        ("policy.betas=[1,2,3]", "policy.betas: got [1, 2, 3], expected a list of two numbers"),
        ("data.train=[]", "data.train: got [], expected a text or a list of texts"),
        ("trackers=[{}]", "trackers: got {}, expected a list of texts"),
        ("rollout=3", "rollout: got 3, expected a section with keys such as replicas"),
        ("rollout.top_p=0.5", "set top_p=1"),
        ("algorithm.aggregation=trajectory_sum_norm", "algorithm.norm_length"),
        ("algorithm.adv_estimator=gdpo algorithm.kl_in_reward=true algorithm.kl_coef=0", "algorithm.kl_in_reward: "),
        ("algorithm.adv_estimator=gdpo reward.tool_weights.search=1", "reward.tool_weights: adv_estimator=gdpo"),
        ("rollout.replicas=[1", "is not YAML"),
        ("rollout.replicas=${oc.env:NOT_THERE}", "NOT_THERE"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_expected(words, message):
    with pytest.raises(ConfigError) as caught:
        load_config(words.split())
    assert message in str(caught.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        build({"run": {"steps": "many"}, "algorithm": {"group_size": 0}})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: [", "cannot be read as YAML"),
        (b"- 1\n- 2", "expected sections"),
        (b"\xff\xfe\xfa", "cannot be read as YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load_file(file)


def test_options_and_words_come_in_any_order():
    line = parse_command_line(["a.b=1", "--dry-run", "--config=x.yaml", "c=2=3"])
    assert (line.file, line.overrides, line.dry_run) == (Path("x.yaml"), ("a.b=1", "c=2=3"), True)
    assert parse_command_line(["--config", "x.yaml"]).file == Path("x.yaml")


@pytest.mark.parametrize("words", [["--confg", "x"], ["train"], ["--config"], ["-x=1"]])
def test_a_word_that_is_neither_option_nor_key_is_refused(words):
    with pytest.raises(ConfigError):
        parse_command_line(words)


def test_the_names_of_all_sections_are_pinned():
    sections = {key.partition(".")[0] for key in fields()}
    assert sections == {
        "run", "data", "cold_start", "agent", "rollout", "retrieval", "reward", "memory_reward", "algorithm",
        "batch_executor", "policy", "weight_sync", "placement", "eval", "alarms", "trackers", "plugins",
    }  # fmt: skip


def test_every_key_says_what_it_means():
    silent = [key for key, field in fields().items() if "." in key and not field.description]
    sections = {key.rpartition(".")[0] for key in fields()}
    assert [key for key in silent if key not in sections] == []


def test_the_reference_page_is_the_one_that_the_schema_makes():
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_the_resolved_form_is_plain_yaml():
    assert yaml.safe_load(resolved_yaml(build({})))["algorithm"]["group_size"] == 8


def test_names_that_the_user_gives_are_no_unknown_keys():
    reward = {"custom_function": {"kwargs": {"unit": {"of": 2}}}, "tool_weights": {"python": 0.5}}
    assert build({"reward": reward}).reward.custom_function.kwargs == {"unit": {"of": 2}}
    with pytest.raises(ConfigError, match=r"Did you mean reward\.tool_weights"):
        build({"reward": {"tool_weight": {"python": 0.5}}})
