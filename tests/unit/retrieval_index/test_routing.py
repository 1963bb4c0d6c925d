import asyncio
from collections import Counter

import pytest

from retrieval_index.routing import SUSPECT_S, Router, choose_replica

QUERIES = [f"mentor {n}" for n in range(300)]


class Away(Exception):
    """What a replica says that has died."""


class Late(Exception):
    """What a replica says that has not answered in time."""


def idle(names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def homes(names: str) -> dict[str, str | None]:
    return {query: choose_replica(idle(names), query) for query in QUERIES}


def test_equal_queries_have_one_home_however_they_are_spaced():
    assert choose_replica(idle("abc"), " mentor  Boko") == choose_replica(idle("abc"), "mentor Boko")


def test_homes_are_spread_evenly():
    counts = Counter(homes("abc").values())
    assert min(counts.values()) > 70


def test_only_the_share_of_a_replica_that_leaves_moves():
    before, after = homes("abc"), homes("ab")
    assert all(after[query] == home for query, home in before.items() if home != "c")
    assert {after[query] for query, home in before.items() if home == "c"} == {"a", "b"}


def test_a_busy_home_spills_over_to_the_least_loaded():
    home = choose_replica(idle("abc"), "q")
    other = min(set("abc") - {home})
    assert choose_replica({**idle("abc"), home: 32}, "q", slack=32) == home
    assert choose_replica({**idle("abc"), home: 33}, "q", slack=32) == other


def test_without_replicas_there_is_no_choice():
    assert choose_replica({}, "q") is None


class Replicas:
    """Replicas that say what they are told to say; `asked` keeps the calls."""

    def __init__(self, **say: Exception | None) -> None:
        self.say, self.asked = say, []
        self.now_s = 0.0
        self.router = Router((Away,), (Late,), clock=lambda: self.now_s)
        self.router.announce(say)

    async def send(self, name: str) -> str:
        self.asked.append(name)
        if (error := self.say[name]) is not None:
            raise error
        return name

    async def ask(self, query: str = "q") -> str | None:
        return await self.router.ask(query, 1, self.send)


async def test_a_call_that_a_replica_fails_is_answered_by_another_and_the_failed_one_is_passed_over_for_a_while():
    home = choose_replica(idle("ab"), "q")
    (other,) = set("ab") - {home}
    replicas = Replicas(**{home: Away(), other: None})
    assert await replicas.ask() == other
    replicas.say[home] = None
    assert await replicas.ask() == other
    replicas.now_s = SUSPECT_S + 0.1
    assert await replicas.ask() == home
    assert replicas.asked == [home, other, other, home]
    assert replicas.router.num_failures == 1


async def test_each_replica_is_asked_once_and_then_the_last_failure_flies():
    replicas = Replicas(a=Away("a"), b=Away("b"), c=Away("c"))
    with pytest.raises(Away):
        await replicas.ask()
    assert sorted(replicas.asked) == ["a", "b", "c"]
    replicas.say = dict.fromkeys("abc")
    assert await replicas.ask() == choose_replica(idle("abc"), "q"), "suspects are asked where there is nobody else"


async def test_after_a_silence_the_next_try_meets_another_replica():
    home = choose_replica(idle("ab"), "q")
    (other,) = set("ab") - {home}
    replicas = Replicas(**{home: Late(), other: None})
    with pytest.raises(Late):
        await replicas.ask()
    assert await replicas.ask() == other


async def test_a_caller_that_gives_up_says_nothing_about_its_replica():
    home = choose_replica(idle("ab"), "q")
    replicas = Replicas(a=None, b=None)

    async def hang(name: str) -> str:
        await asyncio.Event().wait()
        return name

    call = asyncio.create_task(replicas.router.ask("q", 1, hang))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await replicas.ask() == home
    assert replicas.router.num_failures == 0


async def test_calls_in_flight_are_the_load():
    home = choose_replica(idle("ab"), "q")
    (other,) = set("ab") - {home}
    replicas, let_go = Replicas(a=None, b=None), asyncio.Event()

    async def hold(name: str) -> str:
        await let_go.wait()
        return name

    held = asyncio.create_task(replicas.router.ask("q", 33, hold))
    await asyncio.sleep(0)
    assert await replicas.ask() == other
    let_go.set()
    assert await held == home
    assert await replicas.ask() == home


async def test_a_replica_that_joins_is_asked_and_one_that_left_is_not():
    replicas = Replicas(a=None)
    assert await replicas.ask() == "a"
    replicas.say = {"b": None}
    replicas.router.announce("b")
    assert await replicas.ask() == "b"
    replicas.router.announce("")
    assert await replicas.ask() is None


async def test_a_replica_that_leaves_while_a_call_is_tried_is_not_asked():
    home = choose_replica(idle("ab"), "q")
    replicas = Replicas(a=Away(), b=Away())

    async def send(name: str) -> str:
        replicas.router.announce([home])
        return await replicas.send(name)

    with pytest.raises(Away):
        await replicas.router.ask("q", 1, send)
    assert replicas.asked == [home]


async def test_a_call_whose_only_replica_dies_is_asked_of_one_that_has_joined_meanwhile():
    replicas = Replicas(a=Away())
    replicas.say["b"] = None

    async def send(name: str) -> str:
        replicas.router.announce("ab")
        return await replicas.send(name)

    assert await replicas.router.ask("q", 1, send) == "b"
