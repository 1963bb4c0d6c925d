"""The scheduler as a state machine with a fake clock: nothing lost, nothing doubled, budgets kept, nobody starved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo_ray.batching.scheduler import MAX_PADDING_SHARE, Decision, Limits, Scheduler, Ticket
from mempo_ray.errors import Overloaded, TrainingError


def scheduler(
    budget: int = 100, num_ranks: int = 1, max_wait_s: float = 1.0, max_queued: int = 10_000, pads: bool = False
) -> Scheduler:
    return Scheduler(Limits(budget, num_ranks, max_wait_s, max_queued, pads))


def ticket(number: int, cost: int = 10, at: float = 0.0, **kwargs) -> Ticket:
    return Ticket(number, kwargs.pop("id", f"r{number}"), cost, at, kwargs.pop("deadline_s", at + 1000), **kwargs)


def numbers(decision: Decision) -> list[int]:
    return [t.number for t in decision.batch]


def fits(batch: tuple[Ticket, ...], budget: int, num_ranks: int, pads: bool) -> bool:
    """Some greedy assignment keeps every rank within the budget, or a rank holds one dear ticket alone."""
    if pads:
        longest = max(t.cost for t in batch)
        is_padded_little = sum(t.cost for t in batch) >= (1 - MAX_PADDING_SHARE) * len(batch) * longest
        return len(batch) == 1 or (is_padded_little and -(-len(batch) // num_ranks) * longest <= budget)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for t in batch:
        min(ranks, key=sum).append(t.cost)
    return all(sum(costs) <= budget or len(costs) == 1 for costs in ranks)


def test_a_lone_request_waits_for_company_and_then_runs_alone():
    s = scheduler(max_wait_s=1.0)
    s.submit(ticket(0, at=5.0))
    assert s.decide(5.5) == Decision(wake_at_s=6.0)
    assert numbers(s.decide(6.0)) == [0]
    assert len(s) == 0


def test_a_full_budget_is_cut_at_once():
    s = scheduler(budget=100)
    for i in range(11):
        s.submit(ticket(i, cost=10))
    assert numbers(s.decide(0.0)) == list(range(10))
    assert s.decide(0.0).batch == ()


def test_a_budget_that_is_filled_exactly_does_not_wait():
    s = scheduler(budget=20)
    s.submit(ticket(0))
    s.submit(ticket(1))
    assert numbers(s.decide(0.0)) == [0, 1]


def test_the_budget_is_per_rank():
    s = scheduler(budget=100, num_ranks=2)
    for i, cost in enumerate([60, 60, 60]):
        s.submit(ticket(i, cost=cost))
    assert numbers(s.decide(0.0)) == [0, 1]


def test_a_request_dearer_than_the_budget_runs_with_a_rank_to_itself():
    s = scheduler(budget=100)
    s.submit(ticket(0, cost=500))
    s.submit(ticket(1, cost=10))
    assert numbers(s.decide(0.0)) == [0]
    assert numbers(s.decide(2.0)) == [1]


def test_lower_priority_numbers_are_served_first():
    s = scheduler(budget=20)
    for i, priority in enumerate([1, 1, 0, 0]):
        s.submit(ticket(i, priority=priority))
    assert numbers(s.decide(0.0)) == [2, 3]


def test_siblings_move_up_behind_the_first_of_them():
    s = scheduler(budget=40)
    for i, affinity in enumerate(["", "a", "b", "a", "b", "a"]):
        s.submit(ticket(i, affinity=affinity))
    assert numbers(s.decide(0.0)) == [0, 1, 3, 5]
    assert numbers(s.decide(1.0)) == [2, 4]


def test_siblings_of_a_worse_priority_do_not_move_up():
    s = scheduler(budget=20)
    for i, (priority, affinity) in enumerate([(0, "a"), (1, "a"), (0, "b"), (1, "b")]):
        s.submit(ticket(i, priority=priority, affinity=affinity))
    assert numbers(s.decide(0.0)) == [0, 2]
    assert numbers(s.decide(0.0)) == [1, 3]


def test_padded_micro_batches_hold_similar_lengths_and_count_their_padding_into_the_budget():
    s = scheduler(budget=300, pads=True)
    for i, cost in enumerate([100, 10, 98, 10, 97, 96]):
        s.submit(ticket(i, cost=cost))
    assert numbers(s.decide(0.0)) == [0, 2, 4]  # 4 × 100 would be 400
    assert s.decide(0.0).batch == ()  # what is left waits for company
    assert numbers(s.decide(1.0)) == [1, 3]
    assert numbers(s.decide(1.0)) == [5]


def test_lanes_do_not_mix():
    s = scheduler()
    for i, lane in enumerate(["live", "reference", "live"]):
        s.submit(ticket(i, lane=lane))
    assert numbers(s.decide(1.0)) == [0, 2]
    assert numbers(s.decide(1.0)) == [1]


def test_a_full_queue_refuses_with_a_type_and_takes_again_when_drained():
    s = scheduler(budget=50, max_queued=50)
    s.submit(ticket(0, cost=50))
    with pytest.raises(Overloaded, match="max_queued_tokens=50"):
        s.submit(ticket(1, cost=1))
    s.decide(0.0)
    s.submit(ticket(1, cost=500))  # an empty queue takes any


def test_a_set_larger_than_the_queue_limit_is_not_refused():
    s = scheduler(max_queued=15)
    s.begin(3)
    for i in range(3):
        s.submit(ticket(i))
    assert numbers(s.decide(0.0)) == [0, 1, 2]


def test_a_set_begins_only_when_the_one_before_has_left_the_queue():
    s = scheduler()
    s.begin(1)
    s.submit(ticket(0))
    with pytest.raises(TrainingError, match="1 requests of the set before"):
        s.begin(1)
    assert numbers(s.decide(0.0)) == [0]
    s.begin(1)


def test_a_cancelled_request_is_not_run_and_frees_its_tokens():
    s = scheduler()
    s.submit(ticket(0))
    s.submit(ticket(1))
    assert s.cancel(0)
    assert not s.cancel(0)
    assert numbers(s.decide(1.0)) == [1]
    assert s.queued_tokens == 0


def test_a_request_past_its_deadline_is_reported_and_not_run():
    s = scheduler(max_wait_s=10.0)
    s.submit(ticket(0, deadline_s=3.0))
    assert s.decide(0.0).wake_at_s == 3.0
    decision = s.decide(3.0)
    assert [t.number for t in decision.expired] == [0]
    assert decision.batch == ()


def test_what_waits_behind_the_queue_cuts_it_at_once_and_later_arrivals_stay():
    s = scheduler()
    s.submit(ticket(0))
    s.submit(ticket(2))
    assert numbers(s.decide(0.0, until=1)) == [0]
    assert s.decide(0.0, until=1).batch == ()
    assert len(s) == 1


def test_a_stream_of_urgent_requests_does_not_starve_a_patient_one():
    s = scheduler(budget=10)
    s.submit(ticket(0, priority=5, deadline_s=20.0))
    for second in range(20):
        s.submit(ticket(second + 1, at=float(second), deadline_s=second + 1000.0))
        if numbers(s.decide(float(second))) == [0]:
            break
    assert second == 10  # half of its patience


@given(st.permutations(range(9)), st.lists(st.integers(1, 60), min_size=9, max_size=9))
def test_a_set_is_cut_alike_whatever_the_order_of_arrival(order, costs):
    def cuts(arrivals) -> list[list[str]]:
        s = scheduler(budget=100, max_wait_s=0.5)
        s.begin(9)
        for number, i in enumerate(arrivals):
            assert s.decide(float(number)).batch == ()  # held, however long the first has waited
            s.submit(ticket(number, id=f"t{i}", cost=costs[i], at=float(number)))
        out = []
        while batch := s.decide(9.0).batch:
            out.append([t.id for t in batch])
        return out

    assert cuts(order) == cuts(range(9))


arrivals = st.lists(  # cost, priority, gap_s to the one before, lane, affinity, cancelled at once
    st.tuples(
        st.integers(1, 150),
        st.integers(0, 2),
        st.floats(0, 2),
        st.sampled_from("xy"),
        st.sampled_from(["", "a", "b"]),
        st.booleans(),
    ),
    max_size=60,
)


def arrive(s: Scheduler, number: int, at: float, event: tuple, **kwargs) -> Ticket:
    cost, priority, _, lane, affinity, _ = event
    t = ticket(number, cost=cost, at=at, priority=priority, lane=lane, affinity=affinity, **kwargs)
    s.submit(t)
    return t


@given(arrivals, st.integers(1, 3), st.booleans())
def test_nothing_is_lost_or_doubled_and_every_micro_batch_keeps_the_budget(events, num_ranks, pads):
    s = scheduler(budget=100, num_ranks=num_ranks, max_wait_s=1.0, pads=pads)
    now, submitted, served, cancelled = 0.0, set(), [], set()
    for number, event in enumerate(events):
        now += event[2]
        arrive(s, number, now, event)
        submitted.add(number)
        if event[-1] and s.cancel(number):
            cancelled.add(number)
        while batch := s.decide(now).batch:
            assert fits(batch, 100, num_ranks, pads)
            assert len({t.lane for t in batch}) == 1
            served += [t.number for t in batch]
    while batch := s.decide(now + 1.0).batch:
        served += [t.number for t in batch]
    assert sorted(served) == sorted(submitted - cancelled)
    assert (len(s), s.queued_tokens) == (0, 0)


@given(arrivals, st.booleans())
def test_nobody_waits_longer_than_the_longest_wait_when_the_ranks_are_free(events, pads):
    s = scheduler(budget=100, max_wait_s=1.0, pads=pads)
    now = 0.0
    for number, event in enumerate(events):
        target = now + event[2]
        while ((decision := s.decide(now)).wake_at_s is not None and decision.wake_at_s <= target) or decision.batch:
            assert all(now - t.arrived_s <= 1.0 + 1e-9 for t in decision.batch)
            now = now if decision.batch else decision.wake_at_s
        now = target
        arrive(s, number, now, event)


@given(arrivals, st.integers(1, 3), st.booleans())
def test_every_micro_batch_holds_the_first_of_its_lane_whatever_company_moved_up(events, num_ranks, pads):
    """So a request waits for at most as many micro-batches of its lane as there were requests before it."""
    s = scheduler(budget=100, num_ranks=num_ranks, pads=pads)
    waiting = {number: arrive(s, number, 0.0, event) for number, event in enumerate(events)}
    while batch := s.decide(1.0).batch:
        in_lane = [t for t in waiting.values() if t.lane == batch[0].lane]
        assert min(in_lane, key=lambda t: (t.priority, t.number)) in batch
        for t in batch:
            del waiting[t.number]
    assert not waiting


@given(arrivals, st.booleans(), st.floats(2, 40))
def test_nobody_starves_behind_a_stream_of_better_priority(events, pads, patience_s):
    """The ranks serve one micro-batch a second, and every second brings more than that of priority 0."""
    s = scheduler(budget=100, pads=pads)
    patience_s += 2 * len(events)  # in the half of it, all of them can be served
    left = {arrive(s, number, 0.0, event, deadline_s=patience_s).number for number, event in enumerate(events)}
    now, number = 0.0, len(events)
    while left:
        for _ in range(2):
            s.submit(ticket(number := number + 1, cost=100, at=now, lane="x", deadline_s=now + 10_000))
        decision = s.decide(now)
        assert not decision.expired
        left -= {t.number for t in decision.batch}
        now += 1.0


@given(arrivals, st.floats(0.5, 5))
def test_a_request_leaves_at_its_deadline_at_the_latest_and_is_told_once(events, patience_s):
    s = scheduler(budget=100, max_wait_s=3.0)
    now, ended = 0.0, []
    for number, event in enumerate(events):
        now += event[2]
        arrive(s, number, now, event, deadline_s=now + patience_s)
        decision = s.decide(now)
        assert all(t.deadline_s > now for t in decision.batch)
        assert all(t.deadline_s <= now for t in decision.expired)
        ended += [t.number for t in (*decision.batch, *decision.expired)]
    decision = s.decide(now + patience_s)
    ended += [t.number for t in decision.expired]
    assert (decision.batch, sorted(ended)) == ((), list(range(len(events))))
