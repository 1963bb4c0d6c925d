"""Rows that nobody could score are refused when they are loaded."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mempo_ray.config.schema import CustomFunction, Judge, Reward, Style
from mempo_ray.contracts import Task
from mempo_ray.data.tasks import read_tasks
from mempo_ray.errors import ConfigError, DataError
from mempo_ray.rewards.registry import SCORERS, register_scorer
from mempo_ray.rewards.rows import row_check


def task(data_source: str, *golds: str | tuple[str, ...]) -> Task:
    objectives = golds if isinstance(golds[0], tuple) else (golds,)
    return Task("q", "?", objectives, data_source)


@pytest.mark.parametrize(
    ("source", "golds", "kept"),
    [
        ("own", ("the", "Paris"), (("Paris",),)),  # an empty answer would match 'the'
        ("hotpotqa", (("Paris",), ("1789",)), (("Paris",), ("1789",))),
        ("openai/gsm8k", ("1,000",), (("1,000",),)),
        ("openai/gsm8k", ("so 2 + 2 = 4\n#### 4",), (("4",),)),
        ("lighteval/MATH", ("a",), (("a",),)),
        ("HuggingFaceH4/aime_2024", ("033",), (("033",),)),
    ],
)
def test_a_row_keeps_the_answers_that_its_scorer_can_match(source, golds, kept):
    assert row_check(Reward())(task(source, *golds)).golds == kept


@pytest.mark.parametrize(
    ("source", "golds", "message"),
    [
        ("hotpot_qa", ("x",), r"'hotpot_qa' has no scorer \(did you mean 'hotpotqa'\?\); set reward.scorer"),
        ("my-org/task", ("x",), "register_scorer"),
        ("own", ("The", "a."), "empty once case, punctuation and articles are gone"),
        ("nq", (("x",), ("y; z",)), "'y; z' holds ';'"),
        ("openai/gsm8k", ("four",), "'four' is not a number"),
        ("openai/gsm8k", (("1",), ("2",)), "2 objectives"),
        ("lighteval/MATH", (("1",), ("2",)), "2 objectives"),
    ],
)
def test_a_row_that_its_scorer_cannot_use_is_refused(source, golds, message):
    with pytest.raises(DataError, match=message):
        row_check(Reward())(task(source, *golds))


def test_a_named_scorer_takes_every_data_source_and_checks_by_its_own_rule():
    check = row_check(Reward(scorer="gsm8k"))
    assert check(task("whatever", "4")).golds == (("4",),)
    with pytest.raises(DataError, match="not a number"):
        check(task("whatever", "Paris"))
    with pytest.raises(ConfigError, match="unknown name 'gsm9k'"):
        row_check(Reward(scorer="gsm9k"))(task("own", "x"))


def test_a_custom_function_takes_every_row():
    check = row_check(Reward(custom_function=CustomFunction(path="my.py")))
    assert check(task("nobody/knows", "the")).golds == (("the",),)


def test_a_registered_scorer_brings_its_data_source_and_its_check():
    def only_yes(golds):
        if golds != (("yes",),):
            raise DataError("say yes")
        return golds

    @register_scorer("test-org/rows", "test-org/rows-too", golds=only_yes, isolation="process", transcript=True)
    def score(response, settings):
        return 1.0

    assert row_check(Reward())(task("test-org/rows-too", "yes")).golds == (("yes",),)
    with pytest.raises(DataError, match="say yes"):
        row_check(Reward())(task("test-org/rows", "no"))
    entry = SCORERS.get("test-org/rows")
    assert (entry.load(), entry.isolation, entry.transcript) == (score, "process", True)


def test_a_second_registration_of_a_data_source_shows_both_places():
    with pytest.raises(
        ConfigError, match=r"'openai/gsm8k' is registered twice, at mempo_ray.*gsm8k.* and at .*test_rows"
    ):

        @register_scorer("openai/gsm8k")
        def mine(response, settings):
            return 1.0


def test_rows_of_verls_parquet_are_checked_with_their_numbers(tmp_path):
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": "How many?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (source, gold) in enumerate([("openai/gsm8k", "72"), ("openai/gsm8k", "many"), ("gms8k", "1")])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "verl.parquet")
    with pytest.raises(DataError) as caught:
        read_tasks(str(tmp_path / "verl.parquet"), check=row_check(Reward()))
    _, second, third = str(caught.value).splitlines()
    assert second.strip().startswith("row 2: the answer 'many' is not a number")
    assert third.strip().startswith("row 3: data_source 'gms8k' has no scorer (did you mean 'gsm8k'?)")


def test_under_a_hybrid_reward_every_rule_that_applies_must_be_able_to_use_the_row():
    judge = Style(style="api", data_sources=("my-org/*",), judge=Judge(url="http://j", template="t"))
    styles = {"number": Style(scorer="gsm8k", data_sources=("openai/gsm8k",)), "judge": judge}
    check = row_check(Reward(manager="hybrid", styles=styles))
    assert check(task("openai/gsm8k", "4")).golds == (("4",),)
    assert check(task("my-org/essay", "anything")).golds == (("anything",),)
    with pytest.raises(DataError, match="'four' is not a number"):
        check(task("openai/gsm8k", "four"))
    with pytest.raises(DataError, match=r"'nq': no part of reward\.styles scores it"):
        check(task("nq", "x"))
