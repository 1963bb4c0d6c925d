"""Seeds of siblings, and which episodes run again."""

from dataclasses import replace

from mempo_ray.agent.group import episode_seed, next_attempt, run_with_resamples, siblings, turn_seed
from mempo_ray.contracts import EndReason, Task, Trajectory

TASK = Task("q1", "?", (("a",),), "test")


def test_seeds_are_the_same_in_every_process_and_fit_an_int64():
    assert episode_seed(0, "q1", 0) == 6321783691499298983
    assert 0 <= turn_seed(episode_seed(0, "q1", 0), 3) < 2**63


def test_siblings_tasks_runs_and_turns_have_seeds_of_their_own():
    seeds = {episode_seed(run, task, g) for run in (0, 1) for task in ("q1", "q2") for g in range(8)}
    assert len(seeds) == 32
    assert len({turn_seed(seed, t) for seed in seeds for t in range(4)}) == 128


def test_a_group_is_g_requests_that_differ_in_sibling_and_seed():
    group = siblings(TASK, 4, run_seed=1)
    assert [r.sibling for r in group] == [0, 1, 2, 3]
    assert len({r.seed for r in group}) == 4
    assert not any(r.greedy for r in group)


def test_only_infrastructure_is_tried_again_under_the_same_seed_and_with_a_ceiling():
    request = siblings(TASK, 1, run_seed=1)[0]
    for reason in EndReason:
        again = next_attempt(request, reason, max_resamples=1)
        assert (again is not None) == reason.is_infrastructure
    again = next_attempt(request, EndReason.DEADLINE, 1)
    assert again == replace(request, attempt=1)
    assert next_attempt(again, EndReason.DEADLINE, 1) is None


async def test_an_episode_that_breaks_twice_is_excluded_with_its_reason():
    ends = iter([EndReason.ENGINE_FAILED, EndReason.TOOL_FAILED, EndReason.ANSWERED])
    asked = []

    async def run(request):
        asked.append(request)
        return Trajectory(request.task, request.sibling, request.attempt, (), next(ends), {}, (), detail="why")

    trajectory = await run_with_resamples(siblings(TASK, 1, run_seed=1)[0], run, max_resamples=1)
    assert (trajectory.end_reason, trajectory.attempt, trajectory.detail) == (EndReason.TOOL_FAILED, 1, "why")
    assert [r.attempt for r in asked] == [0, 1]
    assert len({r.seed for r in asked}) == 1
