r"""What each benchmark's scorer must accept and must reject: cases in the forms of its own documentation.

`text` is all that the policy wrote; an `<answer>` in it is extracted as the episode does it.
"""

from __future__ import annotations

import pytest

from mempo_ray.config.schema import Reward
from mempo_ray.rewards.contract import Response
from mempo_ray.rewards.registry import scorer_for
from mempo_ray.rewards.scorers.text import last_answer


def score(data_source: str, text: str, *golds: str | tuple[str, ...], scorer: str = "auto") -> float:
    """Golds: aliases of one objective, or a tuple of aliases an objective."""
    settings = Reward(scorer=scorer)
    entry = scorer_for(data_source, settings)
    objectives = golds if isinstance(golds[0], tuple) else (golds,)
    response = Response(data_source, entry.golds(objectives), turns=(text,), answer=last_answer(text))
    found = entry.load()(response, settings)
    return found.score


# -- search question answering: SQuAD's normalisation, aliases as the data sets list them --------------------------


@pytest.mark.parametrize(
    ("source", "answer", "golds"),
    [
        ("nq", "14 December 1972 UTC", ["14 December 1972 UTC", "December 1972"]),
        ("nq", "december 1972", ["14 December 1972 UTC", "December 1972"]),
        ("searchR1_nq", "Bobby Scott and Bob Russell", ["Bobby Scott", "Bobby Scott and Bob Russell"]),
        ("triviaqa", "The Sunset Boulevard!", ["Sunset Boulevard", "Sunset Blvd"]),
        ("searchR1_triviaqa", "sunset blvd.", ["Sunset Boulevard", "Sunset Blvd"]),
        ("popqa", "politician", ["politician", "political leader", "pol"]),
        ("hotpotqa", "yes", ["yes"]),
        ("hotpotqa", "Chief of Protocol", ["Chief of Protocol"]),
        ("searchR1_hotpotqa", "an Animorphs", ["Animorphs"]),
        ("2wikimultihopqa", "no", ["no"]),
        ("musique", "1,952", ["1952", "in 1952"]),
        ("bamboogle", "Nikolai Morozov", ["Nikolai Morozov"]),
        ("searchR1_bamboogle", "  james   harrison ", ["James Harrison"]),
    ],
)
def test_search_qa_accepts(source, answer, golds):
    assert score(source, f"<think>t</think><answer>{answer}</answer>", *golds) == 1


@pytest.mark.parametrize(
    ("source", "text", "golds"),
    [
        ("nq", "<answer>1972</answer>", ["14 December 1972 UTC", "December 1972"]),
        ("hotpotqa", "<answer>no</answer>", ["yes"]),
        ("hotpotqa", "<answer>yes, it is</answer>", ["yes"]),
        ("2wikimultihopqa", "<answer>Zurich</answer>", ["Zürich"]),
        ("bamboogle", "Nikolai Morozov", ["Nikolai Morozov"]),
        ("bamboogle", "<answer>Nikolai Morozov", ["Nikolai Morozov"]),
        ("bamboogle", "<answer>Nikolai Morozov</ans", ["Nikolai Morozov"]),
        ("bamboogle", "<answer></answer>", ["Nikolai Morozov"]),
        ("musique", "", ["1952"]),
        ("popqa", "<answer>politician</answer><answer>actor</answer>", ["politician"]),
    ],
)
def test_search_qa_rejects(source, text, golds):
    assert score(source, text, *golds) == 0


@pytest.mark.parametrize(
    ("scorer", "answer", "golds", "expected"),
    [
        ("substring_match", "He was born in Paris, France.", ["Paris"], 1),
        ("substring_match", "Paris", ["Paris, France"], 0),
        ("f1", "Barack Hussein Obama", ["Barack Obama"], 0.8),
        ("f1", "the Obama", ["Barack Obama", "Obama"], 1),
        ("f1", "yes it is", ["yes"], 0),  # HotpotQA's script: yes and no match nothing but themselves
        ("f1", "no", ["no"], 1),
    ],
)
def test_substring_and_f1_are_scorers_of_their_own(scorer, answer, golds, expected):
    assert score("nq", f"<answer>{answer}</answer>", *golds, scorer=scorer) == pytest.approx(expected)


def test_several_objectives_are_answered_in_order():
    golds = ("Paris",), ("1889", "year 1889")
    assert score("hotpotqa", "<answer>paris; 1889</answer>", *golds) == 1
    assert score("hotpotqa", "<answer>1889; paris</answer>", *golds) == 0


# -- GSM8K ------------------------------------------------------------------------------------------------------


GSM8K_SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May. She sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (GSM8K_SOLUTION, "72"),
        ("so\n#### 72", GSM8K_SOLUTION),  # the data set's own column, a whole solution
        ("#### 1,000", "1000"),
        ("#### 1000", "1,000"),
        ("#### $18", "18"),
        ("#### 72.", "72"),
        ("#### 72.00", "72"),
        ("####-5", "-5"),
        ("#### 70\nwait\n#### 72", "72"),
        ("<think>…</think><answer>72</answer>", "72"),
        ("<answer>#### 72</answer>", "72"),
    ],
)
def test_gsm8k_accepts(text, gold):
    assert score("openai/gsm8k", text, gold) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 72",  # the strict form needs the mark
        "#### seventy-two",
        "#### 720",
        "#### -72",
        "#### 72 \n#### 70",
        "###",
        "#### ",
        "<answer>72 clips</answer>",
        "<answer>72",
    ],
)
def test_gsm8k_rejects(text):
    assert score("openai/gsm8k", text, "72") == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 72 clips.", 1),
        ("first 70, then $72.00!", 1),
        ("72, no: 70", 0),
        ("none", 0),
        ("<answer>72 clips</answer>", 1),
        ("72 <answer>none</answer>", 0),
    ],
)
def test_gsm8k_flexible_takes_the_last_number(text, expected):
    assert score("x", text, "72", scorer="gsm8k_flexible") == expected


# -- mathematics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text", "gold"),
    [
        ("lighteval/MATH", r"so \boxed{\frac12}", r"\frac{1}{2}"),
        ("lighteval/MATH", r"\boxed{0.5}", r"\frac12"),
        ("lighteval/MATH", r"\boxed{\dfrac{1}{2}}.", r"\frac{1}{2}"),
        ("lighteval/MATH", r"\boxed{1,000}", "1000"),
        ("lighteval/MATH", r"\boxed{1{,}000}", "1000"),
        ("lighteval/MATH", r"\boxed{5\text{ cm}}", "5"),
        ("lighteval/MATH", r"\boxed{90^\circ}", "90"),
        ("lighteval/MATH", r"\boxed{\$18}", "18"),
        ("lighteval/MATH", r"\boxed{50\%}", "50"),
        ("lighteval/MATH", r"\boxed{7.}", "7"),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{(x+1)^2}", "x^2+2x+1"),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{\sqrt{12}}", r"2\sqrt{3}"),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{x = 3}", "3"),
        ("HuggingFaceH4/MATH-500", r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left(3,\frac{\pi}{2}\right)"),
        ("HuggingFaceH4/MATH-500", r"\boxed{[0,1)}", "[0,1)"),
        ("HuggingFaceH4/MATH-500", r"\boxed{-2, 1}", "1,-2"),
        ("HuggingFaceH4/MATH-500", r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{evelyn}", r"\text{Evelyn}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{C}", r"\text{(C)}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{\text{even}}", "even"),
        ("HuggingFaceH4/MATH-500", r"\boxed{No}", r"\text{no}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{x \cdot y}", "xy"),
        ("HuggingFaceH4/MATH-500", r"<answer>$\frac{1}{2}$</answer>", r"\frac{1}{2}"),
        ("HuggingFaceH4/MATH-500", r"<answer>it is \boxed{2}</answer>", "2"),
        ("HuggingFaceH4/MATH-500", r"\boxed{1} no: \boxed{2} and \boxed{3", "2"),
        ("math", r"\boxed{3}", r"\boxed{3}"),
        ("aime24", r"\boxed{33}", "033"),
        ("aime_2025", r"The final answer is \boxed{204}.", "204"),
        ("HuggingFaceH4/aime_2024", r"\boxed{025}", "25"),
        ("Maxwell-Jia/AIME_2024", "Answer: 204", "204"),
        ("math_dapo", "Step 1 …\nAnswer: 34", "34"),
        ("math_dapo", "Answer: 3\nAnswer: $34$", "34"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", r"Answer: \boxed{34}", "34"),
        ("numina_olympiads", r"\boxed{\frac{3}{4}}", "0.75"),
    ],
)
def test_mathematics_accepts(source, text, gold):
    assert score(source, text, gold) == 1


@pytest.mark.parametrize(
    ("source", "text", "gold"),
    [
        ("lighteval/MATH", "", "5"),
        ("lighteval/MATH", "5", "5"),  # neither a box nor an answer line
        ("lighteval/MATH", r"\boxed{}", "5"),
        ("lighteval/MATH", r"\boxed{5", "5"),
        ("lighteval/MATH", r"\boxed{\frac{", "5"),
        ("lighteval/MATH", r"\boxed{five}", "5"),
        ("lighteval/MATH", r"\boxed{-5}", "5"),
        ("lighteval/MATH", r"\boxed{0.333}", r"\frac{1}{3}"),
        ("lighteval/MATH", r"\boxed{(2,1)}", "(1,2)"),
        ("lighteval/MATH", r"\boxed{[0,1]}", "[0,1)"),
        ("lighteval/MATH", r"\boxed{3.14}", r"\pi"),
        ("lighteval/MATH", r"\boxed{2} and \boxed{3}", "2"),
        ("HuggingFaceH4/MATH-500", r"\boxed{silent}", r"\text{listen}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{odd}", r"\text{even}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{on}", "no"),
        ("HuggingFaceH4/MATH-500", r"\boxed{\text{no}}", "on"),
        ("HuggingFaceH4/MATH-500", r"\boxed{eys}", r"\text{yes}"),
        ("HuggingFaceH4/MATH-500", r"\boxed{2} <answer>3</answer>", "2"),
        ("HuggingFaceH4/MATH-500", "<answer></answer>", "2"),
        ("aime24", r"\boxed{34}", "33"),
        ("math_dapo", "Answer: 34 or 35", "34"),
        ("math_dapo", "Answer:", "34"),
        ("math_dapo", "Answer: 34\nAnswer: 35", "34"),
    ],
)
def test_mathematics_rejects(source, text, gold):
    assert score(source, text, gold) == 0


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["(" * 3000, "{" * 300, r"\frac" * 60, "(" * 100 + "1" + ")" * 100, "2" * 5000, "^" * 99]
)
def test_what_is_no_answer_is_a_zero_at_once_and_not_a_timeout(text):
    assert score("aime24", f"<answer>{text}</answer>", "2") == 0


# -- Geometry3K -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (r"<think>angles</think> \boxed{48}", "48", 1.0),
        (r"<think>angles</think> \boxed{\frac{13}{2}}", "6.5", 1.0),
        (r"<think>angles</think> \boxed{2 \sqrt{221}}", r"2 \sqrt { 221 }", 1.0),
        ("<mem>m</mem><think>angles</think><answer>48</answer>", "48", 1.0),
        (r"\boxed{48}", "48", 0.9),
        (r"<think>angles</think> \boxed{49}", "48", 0.1),
        (r"<think>angles \boxed{49}", "48", 0.0),
        (r"\boxed{48} <think>angles</think>", "48", 0.9),
        ("", "48", 0.0),
    ],
)
def test_geometry3k_is_accuracy_and_a_tenth_of_format(text, gold, expected):
    assert score("hiyouga/geometry3k", text, gold) == pytest.approx(expected)
