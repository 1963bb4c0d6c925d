"""Memory requests and rewards: which contexts are scored behind which tokens, under each switch."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.algo.memory_reward import MemoryRequest, build_request, dropped_turns, memory_rewards, plan_probes
from mempo_ray.algo.registry import MEMORY_REWARDS
from mempo_ray.config.schema import MemoryReward
from mempo_ray.contracts import EndReason, LogProbResult, PayloadRef, Probe, Task, TrajectorySummary
from mempo_ray.errors import TrainingError

PAYLOAD = PayloadRef("p", None)
PROBE = Probe((7, 8, 9, 10), 1, 3)


def summary(memory=(4, 4, 4), output=(6, 6, 6), tool=(5, 5, 0), probes=(PROBE,)) -> TrajectorySummary:
    turns = len(output)
    versions = tuple(range(turns))
    return TrajectorySummary(
        "q", 2, 0, EndReason.ANSWERED, "", True, (10,) * turns, output, tool, memory, versions, probes
    )


def ask(found: TrajectorySummary, **switches) -> MemoryRequest | None:
    return build_request(found, PAYLOAD, MemoryReward(**switches), policy_version=3, deadline_s=60, priority=1)


def contexts(asked: MemoryRequest) -> list[tuple[str, ...]]:
    """Each context as the names of its slices, e.g. ('prompt_ids0', 'memory_ids1')."""
    request, num_probes = asked.request, len(asked.objectives_K)
    paths = [request.path(i)[:-1] for i in request.marked[::num_probes]]
    return [tuple(f"{request.segments[i].ids.column}{request.segments[i].ids.row}" for i in path) for path in paths]


def sides(asked: MemoryRequest) -> dict[int, tuple]:
    """turn → (memory context, baseline context)."""
    names = contexts(asked)
    return {s.turn: (names[s.memory], None if s.baseline is None else names[s.baseline]) for s in asked.samples}


def answer(asked: MemoryRequest, p_by_context: Mapping[tuple, float | list[float]]) -> LogProbResult:
    """A scorer that gives each context its P (a list: one per probe), as two equal target tokens."""
    logprobs = []
    for name in contexts(asked):
        ps = p_by_context[name]
        for p in ps if isinstance(ps, list) else [ps] * len(asked.objectives_K):
            logprobs.append(np.full(2, math.log(p), np.float32))
    return LogProbResult(asked.request.id, 3, tuple(logprobs))


Q, OUT, TOOL, MEMO = "prompt_ids0", "output_ids{}".format, "tool_ids{}".format, "memory_ids{}".format


# -- probes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "objectives", "texts"),
    [
        ("first", "joined", [("Paris; 1889", 0)]),
        ("first", "per_objective", [("Paris", 0), ("1889", 1)]),
        ("max", "joined", [("Paris", 0), ("Paris, France", 0), ("1889", 1)]),
        ("mean", "per_objective", [("Paris", 0), ("Paris, France", 0), ("1889", 1)]),
    ],
)
def test_probes_are_planned_objective_by_objective(alias, objectives, texts):
    task = Task("q", "?", (("Paris", "Paris, France"), ("1889",)), "test")
    plan = plan_probes(task, MemoryReward(alias=alias, objectives=objectives))
    assert [(p.text, p.objective) for p in plan] == texts


# -- requests ---------------------------------------------------------------------------------------------


def test_full_history_of_turn_t_is_everything_before_it():
    asked = ask(summary())
    assert sides(asked) == {
        0: ((Q, MEMO(0)), (Q,)),
        1: ((Q, MEMO(1)), (Q, OUT(0), TOOL(0))),
        2: ((Q, MEMO(2)), (Q, OUT(0), TOOL(0), OUT(1), TOOL(1))),
    }


def test_the_forest_of_the_contracts_example_states_each_prefix_once():
    asked = ask(summary(memory=(4, 4), output=(6, 6), tool=(5, 0)))
    assert asked.request.num_forest_tokens == 10 + 6 + 5 + 4 + 4 + 4 * len(PROBE.ids)
    assert asked.request.num_plain_tokens == (10) + (10 + 11) + 2 * (10 + 4) + 4 * len(PROBE.ids)


def test_the_request_carries_version_model_and_probability_at_temperature_1():
    request = ask(summary(), scorer="reference").request
    assert (request.policy_version, request.model, request.temperature) == (3, "reference", 1.0)
    assert (request.deadline_s, request.priority, request.payload) == (60, 1, PAYLOAD)


def test_previous_memory_falls_back_to_the_question_where_there_is_none():
    asked = ask(summary(memory=(4, 0, 4, 4), output=(6,) * 4, tool=(5, 5, 5, 0)), baseline="previous_memory")
    assert sides(asked) == {0: ((Q, MEMO(0)), (Q,)), 2: ((Q, MEMO(2)), (Q,)), 3: ((Q, MEMO(3)), (Q, MEMO(2)))}
    assert len(contexts(asked)) == 4  # mem 2 is scored once, though two samples read it


def test_question_only_scores_the_question_once():
    asked = ask(summary(), baseline="question_only")
    assert contexts(asked).count((Q,)) == 1
    assert {base for _, base in sides(asked).values()} == {(Q,)}


def test_without_baseline_the_reward_is_the_memory_side():
    asked = ask(summary(), baseline="none")
    assert len(contexts(asked)) == 3
    ps = {(Q, MEMO(t)): 0.1 * (t + 1) for t in range(3)}
    samples = memory_rewards(asked, answer(asked, ps), MemoryReward(baseline="none"))
    assert [s.reward for s in samples] == pytest.approx([0.1, 0.2, 0.3])
    assert {s.p_base for s in samples} == {0.0}


@pytest.mark.parametrize(("turns", "kept"), [("all", [0, 1]), ("exclude_first", [1]), ("final_only", [1])])
def test_turns_outside_the_pool_are_not_asked_for(turns, kept):
    asked = ask(summary(memory=(4, 4, 0)), turns=turns)
    assert [s.turn for s in asked.samples] == kept


def test_no_memory_or_no_gold_token_gives_no_request():
    assert ask(summary(memory=(0, 0, 0))) is None
    assert ask(summary(probes=())) is None
    assert ask(summary(probes=(Probe((1, 2), 1, 1),))) is None
    assert ask(summary(memory=(4,), output=(3,), tool=(0,)), turns="exclude_first") is None


def test_a_history_above_the_limit_is_dropped_and_counted():
    asked = ask(summary(), max_history_tokens=11)
    assert sorted(sides(asked)) == [0, 1]
    assert asked.num_dropped == 1
    only = MemoryReward(max_history_tokens=1, turns="exclude_first")
    assert build_request(summary(), PAYLOAD, only, policy_version=3, deadline_s=60) is None
    assert dropped_turns(summary(), only) == (1, 2)  # counted even where nothing is left to ask


def test_truncation_cuts_whole_oldest_turns_on_the_full_side_only():
    asked = ask(summary(), max_history_tokens=11, long_history="truncate")
    assert sides(asked)[2] == ((Q, MEMO(2)), (Q, OUT(1), TOOL(1)))
    assert (asked.num_dropped, asked.num_truncated) == (0, 1)
    none_fits = ask(summary(), max_history_tokens=5, long_history="truncate")
    assert sides(none_fits)[2] == ((Q, MEMO(2)), (Q,))


turn_lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8)


@given(
    turn_lengths,
    st.sampled_from(["full_history", "previous_memory", "question_only", "none"]),
    st.integers(0, 40),
    st.sampled_from(["drop", "truncate"]),
)
def test_any_forest_is_well_formed_and_its_full_side_is_a_run_of_turns(turns, baseline, limit, long_history):
    memory, output, tool = zip(*turns, strict=True)
    found = summary(memory=memory, output=output, tool=tool)
    asked = ask(found, baseline=baseline, max_history_tokens=limit, long_history=long_history)
    if asked is None:
        return
    segments = asked.request.segments
    assert all(segment.parent < i for i, segment in enumerate(segments))
    assert len(set(contexts(asked))) == len(contexts(asked))
    for turn, (mem, base) in sides(asked).items():
        assert mem == (Q, MEMO(turn))
        if baseline == "full_history":
            history = [name for s in range(turn) for name in ([OUT(s), TOOL(s)] if tool[s] else [OUT(s)])]
            assert list(base[1:]) == history[len(history) - len(base) + 1 :]
            lengths = {OUT(s): output[s] for s in range(turn)} | {TOOL(s): tool[s] for s in range(turn)}
            assert limit == 0 or sum(lengths[name] for name in base[1:]) <= limit


# -- rewards ----------------------------------------------------------------------------------------------

ONE_TURN = summary(memory=(0, 4), output=(6, 6), tool=(5, 0))
MEM, FULL = (Q, MEMO(1)), (Q, OUT(0), TOOL(0))


def reward(p_mem, p_full, found=ONE_TURN, **switches):
    asked = ask(found, **switches)
    (sample,) = memory_rewards(asked, answer(asked, {MEM: p_mem, FULL: p_full}), MemoryReward(**switches))
    return sample


def test_reward_is_the_difference_of_geometric_mean_probabilities():
    asked = ask(ONE_TURN)
    logprobs = tuple(np.log(np.array(ps, np.float32)) for ps in ([0.5, 0.125], [0.1, 0.9]))
    by_side = dict(zip(contexts(asked), logprobs, strict=True))
    (sample,) = memory_rewards(asked, LogProbResult("x", 5, logprobs), MemoryReward())
    expected = {name: float(np.sqrt(np.exp(lp).prod())) for name, lp in by_side.items()}
    assert sample.p_mem == pytest.approx(expected[MEM], rel=1e-6)
    assert sample.reward == pytest.approx(expected[MEM] - expected[FULL], rel=1e-5)
    assert (sample.turn, sample.weight_version, sample.scorer_version) == (1, 1, 5)


def test_transforms():
    assert reward(0.6, 0.2).reward == pytest.approx(0.4)
    log = reward(0.6, 0.2, transform="logprob")
    assert log.reward == pytest.approx(math.log(3), rel=1e-5)
    assert (log.p_mem, log.p_base) == pytest.approx((0.6, 0.2))
    assert [reward(p, 0.2, transform="sign").reward for p in (0.3, 0.205, 0.1)] == [1, 0, -1]


def test_aliases_are_reduced_on_each_side_separately():
    found = summary(memory=(0, 4), output=(6, 6), tool=(5, 0), probes=(PROBE, PROBE))
    assert reward([0.9, 0.1], [0.2, 0.4], found, alias="max").reward == pytest.approx(0.9 - 0.4)
    assert reward([0.9, 0.1], [0.2, 0.4], found, alias="mean").reward == pytest.approx(0.5 - 0.3)


def test_differences_of_objectives_are_averaged():
    second = Probe(PROBE.ids, 1, 3, objective=1)
    found = summary(memory=(0, 4), output=(6, 6), tool=(5, 0), probes=(PROBE, PROBE, second))
    sample = reward([0.9, 0.1, 0.5], [0.2, 0.4, 0.1], found, alias="max", objectives="per_objective")
    assert sample.reward == pytest.approx(((0.9 - 0.4) + (0.5 - 0.1)) / 2)


@given(st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_probability_reward_is_bounded(p_mem, p_full):
    assert -1 < reward(p_mem, p_full).reward < 1


def test_an_answer_of_another_length_or_not_finite_ends_the_run():
    asked = ask(ONE_TURN)
    with pytest.raises(TrainingError, match="answered 1 segments, 2 asked"):
        memory_rewards(asked, LogProbResult("x", 3, (np.zeros(2, np.float32),)), MemoryReward())
    with pytest.raises(TrainingError, match="non-finite"):
        memory_rewards(asked, LogProbResult("x", 3, (np.full(2, np.nan, np.float32),) * 2), MemoryReward())


def test_the_shipped_method_is_found_by_its_name():
    assert MEMORY_REWARDS.get(MemoryReward().name) == (build_request, memory_rewards)
