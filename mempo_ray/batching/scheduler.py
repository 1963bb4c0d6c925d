"""When which requests run together: a pure state machine. The clock is passed in, in seconds.

    submit(ticket) ──▶ queue ──▶ decide(now) ──▶ Decision(batch | wake_at_s, expired) ──▶ the executor obeys

A micro-batch is cut when the queue fills it, when a request has waited `max_wait_s` for company, or when
something waits behind the queue (`until`). It holds tickets of one lane (live or reference model) and fits
the token budget of every rank; a ticket dearer than the budget has a rank's share to itself.

Order: lower priority first, then arrival. A ticket that has spent half of its time to the deadline goes before all
others, so a stream of urgent requests starves nobody. The first in this order is in the next micro-batch of its lane.
Its company is chosen by what saves tokens:

    runner packs   tickets of one affinity begin with the same tokens: they move up behind the first of them, within
                   their priority; then whatever still fits
    runner pads    those nearest in length, within their priority, while padding stays below `MAX_PADDING_SHARE`

So later tickets overtake a waiting one only in the company of an earlier one: it waits for at most as many
micro-batches of its lane as there were tickets before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from mempo_ray.errors import Overloaded, TrainingError

MAX_PADDING_SHARE = 0.05
"""Of one padded micro-batch. Two short micro-batches compute fewer tokens than one that is padded further."""


@dataclass(frozen=True)
class Limits:
    """`micro_batch_tokens` is per rank, padding included. `pads`: the runner pads a micro-batch to its longest."""

    micro_batch_tokens: int
    num_ranks: int
    max_wait_s: float
    max_queued_tokens: int
    pads: bool = False


@dataclass(frozen=True)
class Ticket:
    """A request, as far as scheduling is concerned. `number` is unique and grows with arrival.

    `cost`: tokens without padding. `affinity`: whom it shares its first tokens with, "" = nobody.
    """

    number: int
    id: str
    cost: int
    arrived_s: float
    deadline_s: float  # absolute, same clock
    priority: int = 0
    lane: Hashable = None
    affinity: str = ""

    @property
    def urgent_at_s(self) -> float:
        return (self.arrived_s + self.deadline_s) / 2


@dataclass(frozen=True)
class Decision:
    """Run `batch` now (one lane, in order); where it is empty, ask again at `wake_at_s` (None: after a submit).

    `expired` tickets have left the queue at their deadline.
    """

    batch: tuple[Ticket, ...] = ()
    expired: tuple[Ticket, ...] = ()
    wake_at_s: float | None = None


class Scheduler:
    """Holds queued tickets only: a ticket in a decision is gone from here."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queue: dict[int, Ticket] = {}
        self._set_missing = 0
        self._set: set[int] = set()
        self.queued_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket. An empty queue takes any, and so does a set: refusing a member would hold the rest for ever.

        Raises:
            Overloaded: the queue would hold more than `max_queued_tokens`.
        """
        bounded = self._queue and not self._set_missing
        if bounded and self.queued_tokens + ticket.cost > self._limits.max_queued_tokens:
            raise Overloaded(
                f"the queue holds {self.queued_tokens} tokens, {ticket.cost} more pass "
                f"max_queued_tokens={self._limits.max_queued_tokens}; retry when it has drained"
            )
        self._queue[ticket.number] = ticket
        self.queued_tokens += ticket.cost
        if self._set_missing:
            self._set.add(ticket.number)
            self._set_missing -= 1

    def cancel(self, number: int) -> bool:
        """Take a ticket out again; False where it is not queued (running, answered, expired)."""
        return self._remove(number) is not None

    def begin(self, expected: int) -> None:
        """The next `expected` tickets are a *set*: held until the last one is here, then cut in order of
        (priority, id) by the token budget alone. Same ids and costs, same micro-batches, whatever the order
        of arrival (`run.deterministic`). One set at a time.

        Raises:
            TrainingError: tickets of the set before are still queued.
        """
        if self._set:
            raise TrainingError(f"{len(self._set)} requests of the set before are still queued; await them first")
        self._set_missing = expected

    def decide(self, now_s: float, until: int | None = None) -> Decision:
        """What to do now. With `until`, something waits behind the tickets numbered below it: only those count,
        and they wait neither for company nor for their set."""
        expired = tuple(t for t in self._queue.values() if t.deadline_s <= now_s)
        for ticket in expired:
            self._remove(ticket.number)
        eligible = [t for t in self._queue.values() if until is None or t.number < until]
        if until is None and self._set_missing:
            eligible = [t for t in eligible if t.number not in self._set]
        eligible.sort(key=lambda t: self._order(t, now_s))
        for lane in dict.fromkeys(t.lane for t in eligible):
            waiting = [t for t in eligible if t.lane == lane]
            batch, is_full = self._pad(waiting) if self._limits.pads else self._pack(self._together(waiting, now_s))
            if is_full or until is not None or any(self._due_at_s(t) <= now_s for t in waiting):
                for ticket in batch:
                    self._remove(ticket.number)
                return Decision(batch, expired)
        wakes = [self._due_at_s(t) for t in eligible] + [t.deadline_s for t in self._queue.values()]
        return Decision((), expired, min(wakes, default=None))

    def _together(self, waiting: Sequence[Ticket], now_s: float) -> list[Ticket]:
        """Tickets of one affinity behind the first of them, within their priority; else as they were."""
        groups: dict[Hashable, list[Ticket]] = {}
        for ticket in waiting:
            key = (self._order(ticket, now_s)[:2], ticket.affinity) if ticket.affinity else ticket.number
            groups.setdefault(key, []).append(ticket)
        return [ticket for group in groups.values() for ticket in group]

    def _pack(self, waiting: Sequence[Ticket]) -> tuple[tuple[Ticket, ...], bool]:
        """The first ticket, and every further one that some rank still has room for; whether there is no more room."""
        budget = self._limits.micro_batch_tokens
        loads = [0] * self._limits.num_ranks
        batch = []
        for ticket in waiting:
            rank = min(range(len(loads)), key=loads.__getitem__)
            if loads[rank] == 0 or loads[rank] + ticket.cost <= budget:
                loads[rank] += ticket.cost
                batch.append(ticket)
            if min(loads) >= budget:
                break
        return tuple(batch), len(batch) < len(waiting) or sum(loads) >= budget * len(loads)

    def _pad(self, waiting: Sequence[Ticket]) -> tuple[tuple[Ticket, ...], bool]:
        """The first ticket, and those nearest to it in length; whether there is no more room."""
        first = waiting[0]
        batch, longest, num_tokens, is_full = [first], first.cost, first.cost, False
        for ticket in sorted(waiting[1:], key=lambda t: (t.priority, abs(t.cost - first.cost))):
            padded_to, num = max(longest, ticket.cost), len(batch) + 1
            if -(-num // self._limits.num_ranks) * padded_to > self._limits.micro_batch_tokens:
                is_full = True
            elif num * padded_to - num_tokens - ticket.cost <= MAX_PADDING_SHARE * num * padded_to:
                batch.append(ticket)
                longest, num_tokens = padded_to, num_tokens + ticket.cost
        return tuple(batch), is_full

    def _order(self, ticket: Ticket, now_s: float) -> tuple:
        if ticket.number in self._set:
            return (1, ticket.priority, ticket.id)
        return (0,) if ticket.urgent_at_s <= now_s else (1, ticket.priority, "")

    def _due_at_s(self, ticket: Ticket) -> float:
        in_complete_set = ticket.number in self._set and not self._set_missing
        return ticket.arrived_s + (0.0 if in_complete_set else self._limits.max_wait_s)

    def _remove(self, number: int) -> Ticket | None:
        ticket = self._queue.pop(number, None)
        if ticket is not None:
            self.queued_tokens -= ticket.cost
            self._set.discard(number)
        return ticket
