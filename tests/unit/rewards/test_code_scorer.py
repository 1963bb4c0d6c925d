"""Programs that the code scorer must accept and reject, in the forms of its data sets."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from mempo_ray.config.schema import Reward, Sandbox
from mempo_ray.contracts import Scored, Unscored
from mempo_ray.errors import DataError
from mempo_ray.rewards.contract import Response, score_with
from mempo_ray.rewards.golds import program_golds
from mempo_ray.rewards.registry import scorer_for
from mempo_ray.rewards.sandbox.levels import Level
from mempo_ray.rewards.sandbox.local import detect_level
from mempo_ray.rewards.sandbox.outcome import Outcome, Status
from mempo_ray.rewards.scorers.code import extract_program, same_output, score_program
from mempo_ray.rewards.scorers.program_tests import read_tests
from tests.fakes.judges import Answer, scripted_server

SUM = {"inputs": ["1 2\n", "10 -3\n"], "outputs": ["3\n", "7\n"]}
CALL = {"fn_name": "two_sum", "inputs": [[[2, 7, 11], 9], [[3, 3], 6]], "outputs": [[0, 1], [0, 1]]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"
TWO_SUM = """
    def two_sum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for i, number in enumerate(nums):
            if target - number in seen:
                return (seen[target - number], i)
            seen[number] = i
"""


def response(text: str, tests: dict, *, answer: bool = False, data_source: str = "apps") -> Response:
    return Response(
        data_source, ((json.dumps(tests),),), turns=(f"<answer>{text}</answer>" if answer else text,),
        answer=text if answer else None,
    )  # fmt: skip


def fenced(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```\nDone."


@dataclasses.dataclass
class FakeSandbox:
    """Answers in turn."""

    outcomes: list[Outcome]
    allowed_s: list[float] = dataclasses.field(default_factory=list)

    def run(self, source: str, stdin: str = "", *, at_most_s: float = math.inf) -> Outcome:
        self.allowed_s.append(at_most_s)
        return self.outcomes.pop(0)

    async def run_async(self, source: str, stdin: str = "", *, at_most_s: float = math.inf) -> Outcome:
        return self.run(source, stdin, at_most_s=at_most_s)


def printed(text: str, seconds: float = 0.1) -> Outcome:
    return Outcome(Status.OK, text, exit_code=0, seconds=seconds)


def scored(given: Response, settings: Reward = Reward()) -> Scored:  # noqa: B008 - frozen
    """Through the registry, the real sandbox included."""
    score = score_with(scorer_for(given.data_source, settings).load(), given, settings)
    if detect_level()[0] < Level.NAMESPACES_UID:
        assert isinstance(score, Unscored)
        assert "reward.sandbox" in score.reason
        pytest.skip(f"the machine's sandbox is weak, and the scorer refused: {score.reason}")
    assert isinstance(score, Scored)
    return score


@pytest.mark.parametrize("data_source", ["codecontests", "apps", "codeforces", "taco"])
def test_a_right_program_passes_all_tests_of_each_data_source(data_source):
    score = scored(response(fenced(ADD), SUM, data_source=data_source))
    assert (score.score, score.extra["num_tests"], score.extra["num_passed"]) == (1.0, 2, 2)


@pytest.mark.parametrize(
    ("text", "tests", "share"),
    [
        (fenced("print(3)"), SUM, 0.5),
        (fenced(ADD + "\nraise SystemExit(1)"), SUM, 0.0),
        (fenced("print(2 +"), SUM, 0.0),
        ("I do not know.", SUM, 0.0),
        ("```python\n" + ADD, SUM, 0.0),
        ("", SUM, 0.0),
        (fenced("print('3\\n7')"), SUM, 0.0),
        (fenced("import sys; print(sys.stdin.read().upper())"), {"inputs": [["a", "b"]], "outputs": [["A", "B"]]}, 1.0),
        (fenced("class Solution:" + TWO_SUM), CALL, 1.0),
        (fenced(TWO_SUM.replace("    def", "def").replace("\n    ", "\n").replace("self, ", "")), CALL, 1.0),
        (fenced("def two_sum(nums, target):\n  print('noise')\n  return [0, 1]"), CALL, 1.0),
        (fenced("def two_sum(nums, target): return [0, nums[1] - 6]"), CALL, 0.5),
        (fenced("def other(nums, target): return [0, 1]"), CALL, 0.0),
        (fenced("def two_sum(nums, target): return {0, 1}"), CALL, 0.0),
        (fenced("if __name__ == '__main__': input()\ndef two_sum(a, b): return [0, 1]"), CALL, 1.0),
        (fenced("import os\ndef two_sum(a, b): os.write(1, b'result:[0'); os._exit(0)"), CALL, 0.0),
        (fenced("def f(s): return s"), {"fn_name": "f", "inputs": ['"ab"'], "outputs": ['"ab"']}, 1.0),
        (fenced("def f(a, b): return a + b"), {"fn_name": "f", "inputs": ["1\n2"], "outputs": ["3"]}, 1.0),
        (fenced("def f(a): return a"), {"fn_name": "f", "inputs": [[5]], "outputs": [[5]]}, 1.0),
    ],
)  # fmt: skip
def test_a_program_gets_the_share_of_tests_that_it_passes(text, tests, share):
    assert scored(response(text, tests)).score == share


MAX = "def biggest(a):\n  return max(a)"
ASSERTS = [
    "assert biggest([1, 3, 2]) == 3",
    "assert biggest([-1]) == -1, 'one'",
    "from math import inf\nassert biggest([inf]) == inf",
]


@pytest.mark.parametrize(
    ("program", "tests", "share"),
    [
        (MAX, {"assert_case": ASSERTS}, 1.0),
        (MAX, {"inputs": ["", "", ""], "outputs": ["", "", ""], "assert_case": ASSERTS}, 1.0),
        (ADD, SUM | {"assert_case": ["", ""]}, 1.0),
        (MAX, ASSERTS, 1.0),
        (MAX, "\n".join(ASSERTS), 1.0),
        (MAX, {"assert_case": "def check(candidate):\n  assert candidate([2]) == 2\ncheck(biggest)"}, 1.0),
        ("class Solution:\n  def biggest(self, a: List[int]): return max(a)",
         {"functional": "def check(f):\n    assert f([1]) == 1\ncheck(Solution().biggest)"}, 1.0),
        (MAX + "\nif __name__ == '__main__': input()", ASSERTS, 1.0),
        (MAX + "\nprint('noise')", ASSERTS, 1.0),
        (MAX.replace("max(a)", "abs(a[0])"), ASSERTS, 1 / 3),
        (MAX.replace("max(a)", "0"), ASSERTS, 0.0),
        ("def other(): pass", ASSERTS, 0.0),
        ("raise SystemExit(0)", ASSERTS, 0.0),
        ("def biggest(a):\n  raise SystemExit(0)", ASSERTS, 0.0),
        ("import os\ndef biggest(a):\n  os.write(1, b'result:\\n'); os._exit(0)", ASSERTS, 0.0),
        ("def biggest(a", ASSERTS, 0.0),
    ],
)  # fmt: skip
def test_code_after_the_program_says_whether_it_is_right(program, tests, share):
    text = tests if isinstance(tests, str) else json.dumps(tests)
    assert scored(Response("apps", ((text,),), turns=(fenced(program),))).score == pytest.approx(share)


def test_a_row_with_a_list_of_asserts_has_as_many_tests_and_not_as_many_aliases():
    ((tests,),) = program_golds((tuple(ASSERTS),))
    assert [test.code for test in read_tests(tests).tests] == ASSERTS


def test_all_or_nothing_counts_only_a_program_that_passes_every_test():
    strict = Reward(code_tests="all")
    assert scored(response(fenced("print(3)"), SUM), strict).score == 0.0
    assert scored(response(fenced(ADD), SUM), strict).score == 1.0


@pytest.mark.parametrize("program", ["while True: pass", "print('x' * 10**8)", "x = bytearray(10 << 30)"])
def test_a_program_beyond_its_limits_gets_0(program):
    score = scored(response(fenced(program), SUM), Reward(sandbox=Sandbox(run_s=0.3), code_s=0.5))
    assert score.score == 0.0


def test_a_test_that_the_sandbox_failed_leaves_the_response_unscored():
    sandbox = FakeSandbox([printed("3"), Outcome(Status.SANDBOX_FAILED, detail="no memory for a process")])
    score = score_program(response(fenced(ADD), SUM), Reward(), sandbox)
    assert score == Unscored("sandbox: no memory for a process", "infrastructure")


def test_a_sandbox_that_is_silent_leaves_the_response_unscored():
    with scripted_server(lambda request, number: Answer(500)) as server:
        settings = Reward(sandbox=Sandbox(url=server.url, retries=0))
        score = score_with(scorer_for("taco", settings).load(), response(fenced(ADD), SUM), settings)
    assert isinstance(score, Unscored)
    assert (score.kind, "HTTP 500" in score.reason) == ("infrastructure", True)


def test_a_remote_sandbox_scores_as_a_local_one():
    def reply(request: dict, number: int) -> Answer:
        a, b = map(int, request["stdin"].split())
        result = {"status": "Finished", "return_code": 0, "stdout": f"{a + b}\n", "stderr": "", "execution_time": 0.1}
        return Answer(body={"status": "Success", "message": "", "run_result": result})

    with scripted_server(reply) as server:
        settings = Reward(sandbox=Sandbox(url=server.url))
        score = score_with(scorer_for("taco", settings).load(), response(fenced(ADD), SUM), settings)
    assert isinstance(score, Scored)
    assert score.score == 1.0
    assert server.requests[0]["code"] == ADD + "\n"


def test_tests_share_a_budget_of_the_code_s_own_seconds_and_the_rest_fails():
    three = {"inputs": ["", "", ""], "outputs": ["1", "1", "1"]}
    sandbox = FakeSandbox([printed("1", seconds=6), printed("1", seconds=5), printed("1")])
    score = score_program(response(fenced("print(1)"), three), Reward(code_s=10), sandbox)
    assert isinstance(score, Scored)
    assert score.score == pytest.approx(2 / 3)
    assert sandbox.allowed_s == [10, 4]


def test_extra_says_how_the_runs_ended():
    sandbox = FakeSandbox([printed("3"), Outcome(Status.TIMEOUT, seconds=1)])
    score = score_program(response(fenced(ADD), SUM), Reward(), sandbox)
    assert isinstance(score, Scored)
    assert {
        "code": True,
        "num_tests": 2,
        "num_passed": 1,
        "code/ok": 1,
        "code/timeout": 1,
    }.items() <= score.extra.items()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n``` or better ```python\nb\n```", "b\n"),
        ("```json\n{}\n``` then\n```py\na\n```", "a\n"),
        ("```json\n{}\n``` then ``` loose", None),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```\nits output\n```", "a\n"),
        ("```Python3\r\na\n```", "a\n"),
        ("```cpp\nint main;\n```", None),
        ("no program", None),
    ],
)
def test_the_program_is_the_last_python_block(text, program):
    assert extract_program(response(text, SUM)) == program


def test_an_answer_without_a_block_is_the_program_and_earlier_blocks_are_not():
    turns = ("```python\ndraft\n```", "<answer>print(1)</answer>")
    given = Response("apps", (("{}",),), turns=turns, answer="print(1)")
    assert extract_program(given) == "print(1)"


def test_a_program_in_tool_text_only_is_none():
    assert extract_program(Response("apps", (("{}",),), turns=("<mem>m</mem>",), tool_texts=(fenced(ADD),))) is None


@pytest.mark.parametrize(
    ("shown", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", True),
        ("YES", "yes", False),
        ("2.50000001", "2.5", True),
        ("2.6", "2.5", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("nan", "2.5", False),
        ("1", "1 2", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_word_for_word(shown, expected, same):
    assert same_output(shown, expected) is same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "not JSON",
        "{}",
        "3",
        "assert f(",
        '["assert f(1)", " "]',
        '{"assert_case": [1]}',
        '{"functional": {}}',
        "def check(f): assert f(1)",
        '["assert True", "METADATA = {}"]',
        '{"inputs": []}',
        '{"inputs": [], "outputs": []}',
        '{"inputs": [1], "outputs": []}',
    ],
)
def test_tests_in_another_form_are_refused_when_rows_are_loaded(text):
    with pytest.raises(DataError, match="tests of a program"):
        program_golds(((text,),))


def test_call_tests_take_lists_or_their_json():
    as_lists = read_tests(json.dumps(CALL))
    as_text = {**CALL, "inputs": ["[2, 7, 11]\n9", "[3, 3]\n6"], "outputs": ["[0, 1]", "[0, 1]"]}
    assert as_lists == read_tests(json.dumps(as_text))


def test_several_sets_of_tests_are_no_row_of_one_program():
    with pytest.raises(DataError, match="tests of a program"):
        program_golds(((json.dumps(SUM), json.dumps(CALL)),))
