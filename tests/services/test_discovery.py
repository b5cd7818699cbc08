"""Where executors are: targets, their forms, and answers of DNS that come, change and fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from scheduler.discovery import RESOLVE_PERIOD, BadTarget, Discovery, join_address, resolve_name, split_target
from tests.services.executors import until

Answer = Sequence[str] | Exception


class Names:
    """A name server whose answers a test sets; `hangs` answers nothing at all."""

    def __init__(self, **answers: Answer) -> None:
        self.answers: dict[str, Answer] = dict(answers)
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host == "hangs":
            await asyncio.Event().wait()
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def watch(self, *targets: str) -> AsyncGenerator[frozenset[str], None]:
        return Discovery(targets, self.resolve, period=0.001).changes()

    async def asked_again(self) -> None:
        """Twice more, so that one whole question was put since."""
        wanted = len(self.asked) + 2
        await until(lambda: len(self.asked) >= wanted)


@pytest.mark.parametrize(
    ("target", "host", "port"),
    [("here:1", "here", 1), ("10.0.0.1:65535", "10.0.0.1", 65535), ("[::1]:50052", "::1", 50052)],
)
def test_a_target_is_host_and_port_and_comes_back_the_same(target: str, host: str, port: int) -> None:
    assert split_target(target) == (host, port)
    assert join_address(host, port) == target


@pytest.mark.parametrize("target", ["here", "here:", ":1", "here:0", "here:65536", "here:x", "::1:50052", "[]:1", ""])
def test_anything_else_is_refused(target: str) -> None:
    with pytest.raises(BadTarget):
        Discovery([target])


async def test_numbers_are_addresses_already_and_nobody_is_asked() -> None:
    names = Names()
    async with aclosing(names.watch("127.0.0.1:5", "[::1]:5")) as changes:
        found: frozenset[str] = frozenset()
        while len(found) < 2:
            found = await anext(changes)
    assert found == {"127.0.0.1:5", "[::1]:5"}
    assert names.asked == []


async def test_a_name_stands_for_all_its_addresses_of_both_kinds() -> None:
    async with aclosing(Names(all=["10.0.0.1", "fd00::1"]).watch("all:7")) as changes:
        assert await anext(changes) == {"10.0.0.1:7", "[fd00::1]:7"}


async def test_an_address_that_appears_is_told_at_the_next_question_and_one_that_vanishes_too() -> None:
    names = Names(all=["10.0.0.1"])
    async with aclosing(names.watch("all:7")) as changes:
        assert await anext(changes) == {"10.0.0.1:7"}
        names.answers["all"] = ["10.0.0.1", "10.0.0.2"]
        assert await anext(changes) == {"10.0.0.1:7", "10.0.0.2:7"}
        names.answers["all"] = ["10.0.0.2"]
        assert await anext(changes) == {"10.0.0.2:7"}


def test_questions_are_put_at_least_once_a_second() -> None:
    assert RESOLVE_PERIOD <= 1.0


@pytest.mark.parametrize("failure", [OSError("no such name"), UnicodeError("label too long"), ()])
async def test_a_failed_or_empty_answer_changes_nothing(failure: Answer) -> None:
    names = Names(all=["10.0.0.1"])
    async with aclosing(names.watch("all:7")) as changes:
        await anext(changes)
        names.answers["all"] = failure
        news = asyncio.ensure_future(anext(changes))
        await names.asked_again()
        assert not news.done()
        names.answers["all"] = ["10.0.0.3"]
        assert await news == {"10.0.0.3:7"}


async def test_the_same_answer_in_another_order_is_no_news() -> None:
    names = Names(all=["10.0.0.1", "10.0.0.2"])
    async with aclosing(names.watch("all:7")) as changes:
        await anext(changes)
        names.answers["all"] = ["10.0.0.2", "10.0.0.1"]
        news = asyncio.ensure_future(anext(changes))
        await names.asked_again()
        assert not news.done()
        news.cancel()
        await asyncio.gather(news, return_exceptions=True)


async def test_a_name_server_that_hangs_delays_no_other_name_and_is_asked_once() -> None:
    names = Names(all=["10.0.0.1"])
    async with aclosing(names.watch("hangs:1", "all:7")) as changes:
        assert await anext(changes) == {"10.0.0.1:7"}
        names.answers["all"] = ["10.0.0.2"]
        assert await anext(changes) == {"10.0.0.2:7"}
        await names.asked_again()
        assert names.asked.count("hangs") == 1


async def test_two_names_of_one_address_are_one_address() -> None:
    names = Names(a=["10.0.0.1"], b=["10.0.0.1"])
    async with aclosing(names.watch("a:7", "b:7", "10.0.0.1:7")) as changes:
        assert await anext(changes) == {"10.0.0.1:7"}


async def test_nobody_asks_any_more_once_it_is_closed() -> None:
    names = Names(all=["10.0.0.1"])
    async with aclosing(names.watch("all:7")) as changes:
        await anext(changes)
    await asyncio.sleep(0)
    asked = len(names.asked)
    await asyncio.sleep(0.05)
    assert len(names.asked) == asked


async def test_the_systems_own_resolver_knows_this_machine() -> None:
    assert "127.0.0.1" in await resolve_name("localhost", 1)
