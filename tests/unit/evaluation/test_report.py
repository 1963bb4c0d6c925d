"""What `mempo-ray eval` and `mempo-ray ask` print, and the first samples of a run."""

import io
import json
from dataclasses import replace

import numpy as np
from rich.console import Console

from mempo_ray.contracts import EndReason, Scored, Task, Unscored
from mempo_ray.evaluation.report import EvalReport
from mempo_ray.evaluation.transcript import episode_panels, episode_text, transcript
from tests.fakes.trajectories import trajectory, turn

HOTPOT = Task("h", "Where?", golds=(("Paris",),), data_source="hotpotqa")
NQ = Task("n", "Who?", golds=(("Ada Lovelace",),), data_source="nq")


def printed(thing: object) -> str:
    paper = io.StringIO()
    Console(file=paper, width=100).print(thing)
    return paper.getvalue()


def report() -> EvalReport:
    answers = [(HOTPOT, "Paris"), (HOTPOT, None), (NQ, "Lovelace")]
    return EvalReport.of("step_000010", "dev.jsonl", [trajectory(a, task=task) for task, a in answers], 1)


def test_means_are_over_questions_by_data_source_and_over_all() -> None:
    by_source = report().by_source
    assert list(by_source) == ["hotpotqa", "nq", "all"]
    assert [by_source[name]["eval/em"] for name in by_source] == [0.5, 0.0, 1 / 3]
    assert by_source["nq"]["eval/f1"] == 2 / 3
    assert by_source["all"]["eval/num_questions"] == 3


def test_the_table_shows_every_source_and_what_was_excluded() -> None:
    text = printed(report().table())
    for word in ("EM", "F1", "TT", "PT", "hotpotqa", "nq", "all", "0.333", "1 episodes excluded"):
        assert word in text


def test_the_json_has_the_same_numbers_under_plain_names() -> None:
    read = json.loads(report().to_json())
    assert read["num_excluded"] == 1
    assert read["results"]["hotpotqa"]["em"] == 0.5
    assert set(read["results"]["all"]) >= {"em", "f1", "total_tokens_mean", "peak_tokens_mean"}


def episode():
    first = turn(
        text="<mem>nothing yet</mem><think>look</think><search>home of X</search>",
        tool_text="<tool_response>X: X lives in Paris .\nY: elsewhere</tool_response>",
    )
    last = turn(text="<mem>Paris</mem><think>done</think><answer>Paris</answer>")
    return trajectory("Paris", turns=[replace(first, tool_ids=np.arange(5, dtype=np.int32)), last])


def test_an_episode_reads_turn_by_turn_with_its_memory_search_passages_and_tokens() -> None:
    assert episode_text(episode()).splitlines() == [
        "question: Where was X born?",
        "turn 1",
        "  memory   nothing yet",
        "  thought  look",
        "  search   home of X",
        "  passages X: X lives in Paris .",
        "           Y: elsewhere",
        "  tokens   3 in, 2 out",
        "turn 2",
        "  memory   Paris",
        "  thought  done",
        "  answer   Paris",
        "  tokens   3 in, 2 out",
        "answer: Paris",
    ]


def test_the_terminal_shows_the_same_words_and_no_markup_of_the_policy_is_obeyed() -> None:
    marked = trajectory("x", turns=[turn(text="<mem>[bold]m[/bold]</mem>")])
    assert "[bold]m[/bold]" in printed(episode_panels(marked))
    text = printed(episode_panels(episode()))
    assert all(word in text for word in ("turn 1", "turn 2", "nothing yet", "X lives in Paris", "answer: Paris"))


def test_a_turn_without_blocks_is_shown_raw_and_an_episode_without_answer_says_why() -> None:
    babble = trajectory(None, turns=[turn(text="blah <mem>")], end_reason=EndReason.FORMAT_STOP)
    text = episode_text(babble)
    assert "  text     blah <mem>" in text
    assert text.endswith("no answer: the episode ended as format_stop after 1 turns")


def test_a_sample_of_training_shows_prompts_tagged_text_and_the_score_by_rule() -> None:
    searched = trajectory("Rome", failed_checks=["mem_paired"], turns=[turn(text="<mem>m</mem><answer>Rome</answer>")])
    extra = {"format/mem_paired": False, "exact_match": (0.0,), "traj_avg_mem_reward": 0.5}
    text = transcript(searched, Scored(0.25, extra), extra, decode=lambda ids: f"ids {ids}")
    assert text.splitlines() == [
        "question: Where was X born?",
        "--- turn 1, prompt (3 tokens)",
        "ids [0, 1, 2]",
        "--- turn 1, response (2 tokens)",
        "<mem>m</mem><answer>Rome</answer>",
        "---",
        "answer: Rome",
        "gold: Paris",
        "format: failed mem_paired",
        "exact_match: (0.0,)",
        "traj_avg_mem_reward: 0.5",
        "score: 0.25",
    ]
    late = transcript(trajectory(), Unscored("took 30 s", "timeout"), {}, decode=str)
    assert late.splitlines()[-2:] == ["format: valid", "unscored: timeout: took 30 s"]
