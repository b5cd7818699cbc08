"""Bearer tokens: who is let in, as whom, and what each may do."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from octavo.client import AccessDenied, AsyncClient, QueueFull
from octavo.v1 import generation_pb2 as pb

from scheduler.authentication import BadTokens, Tokens, read_tokens
from scheduler.caller import Caller
from tests.services.fake_engine import FakeEngine, answer, hang, text_ids
from tests.services.harness import Running, serving, until

ACME, OTHER, ADMIN = "acme-token-0123456789", "other-token-0123456789", "admin-token-0123456789"
DIGEST = hashlib.sha256(OTHER.encode()).hexdigest()
LINES = f"# who  token\nacme {ACME}\n\nother sha256:{DIGEST}  # its digest alone\noperations {ADMIN} admin\n"


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(LINES)
    return path


@pytest_asyncio.fixture
async def running(tokens_file: Path) -> AsyncIterator[Running]:
    async with serving(FakeEngine(script=answer(*text_ids("Hello"))), tokens_file=tokens_file) as running:
        yield running


def client_of(running: Running, token: str | None) -> AsyncClient:
    return AsyncClient(running.address, timeout=10, token=token)


@pytest.mark.parametrize(("token", "tenant"), [(ACME, "acme"), (OTHER, "other"), (ADMIN, "operations")])
async def test_the_tenant_of_a_request_is_that_of_its_token(running: Running, token: str, tenant: str) -> None:
    async with client_of(running, token) as client:
        assert (await client.complete(text="Hi")).text == "Hello"
    assert running.engine.tickets[0].submission.tenant == tenant


@pytest.mark.parametrize(
    ("token", "sentence"),
    [(None, "a bearer token is needed"), ("wrong-token-0123456789", "is not known"), ("x" * 5000, "is not known")],
)
async def test_without_a_known_token_nothing_is_answered_but_health(
    running: Running, token: str | None, sentence: str
) -> None:
    async with client_of(running, token) as client:
        for call in (
            client.complete(text="Hi"),
            client.model(),
            client.tokenize("Hi"),
            client.abort("x"),
            client.load(),
        ):
            with pytest.raises(AccessDenied, match=sentence):
                await call
        assert await client.health()
    assert running.engine.tickets == []


async def test_a_request_that_names_another_tenant_is_refused_to_all_but_an_admin(running: Running) -> None:
    async with client_of(running, ACME) as client:
        with pytest.raises(AccessDenied, match="the token is of tenant 'acme', and the request names 'other'"):
            await client.complete(text="Hi", tenant="other")
        with pytest.raises(AccessDenied):
            await client.abort("r", tenant="other")
        assert (await client.complete(text="Hi", tenant="acme")).text == "Hello"
    async with client_of(running, ADMIN) as client:
        assert (await client.complete(text="Hi", tenant="other")).text == "Hello"


async def test_what_concerns_all_tenants_takes_an_admin(running: Running) -> None:
    async with client_of(running, ACME) as client:
        for name, call in (("GetLoad", client.load()), ("Drain", client.drain())):
            with pytest.raises(AccessDenied, match=f"{name} takes a token marked admin"):
                await call
        for name, watch in (("WatchLoad", client.watch_load()), ("WatchBlocks", client.watch_blocks())):
            with pytest.raises(AccessDenied, match=f"{name} takes a token marked admin"):
                await anext(aiter(watch))
    async with client_of(running, ADMIN) as client:
        assert (await client.load()).queue_limit > 0


async def test_two_tokens_in_one_call_are_none(running: Running) -> None:
    metadata = (("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {ADMIN}"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.GetModel(pb.GetModelRequest(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_changed_file_counts_from_the_next_call_and_a_broken_one_not(
    running: Running, tokens_file: Path
) -> None:
    async with client_of(running, ACME) as client:
        await client.model()
        replace(tokens_file, f"acme {ACME}\nno second word\n")
        await client.model()
        replace(tokens_file, f"other {OTHER}\n")
        with pytest.raises(AccessDenied, match="not known"):
            await client.model()
    async with client_of(running, OTHER) as client:
        await client.model()


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


async def test_a_tenant_has_no_more_requests_at_once_than_it_may(tokens_file: Path) -> None:
    async with (
        serving(FakeEngine(script=hang), tokens_file=tokens_file, max_tenant_requests=2) as running,
        client_of(running, ACME) as client,
        client_of(running, OTHER) as other,
    ):
        streams = [client.generate(text="Hi") for _ in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(QueueFull, match="tenant 'acme' has 2 requests in flight, which is all it may have") as full:
            await client.complete(text="Hi")
        assert full.value.retry_after == 1
        await anext(other.generate(text="Hi"))
        await streams[0].aclose()
        await until(lambda: running.server._service._num_in_flight["acme"] == 1)
        await anext(client.generate(text="Hi"))


@pytest.mark.parametrize("share", [False, True])
async def test_cached_prefixes_are_a_tenants_own_unless_shared(share: bool) -> None:
    async with (
        serving(FakeEngine(script=answer(*text_ids("Hello"))), share_prefixes=share) as running,
        AsyncClient(running.address) as client,
    ):
        for tenant, salt in (("a", ""), ("b", ""), ("a", "s"), ("a:", "s"), ("a", ":s"), ("a", "")):
            await client.complete(text="Hi", tenant=tenant, cache_salt=salt)
    salts = [ticket.submission.cache_salt for ticket in running.engine.tickets]
    assert salts[0] == salts[5]
    assert len(set(salts)) == (3 if share else 5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "tokens holds no token"),
        ("acme", r"tokens, line 1: not of the form TENANT TOKEN \[admin\]"),
        (f"acme {ACME} root", "line 1: not of the form"),
        ("acme short", "line 1: a token has 16 characters at least, or is sha256:HEX"),
        ("acme sha256:12", "line 1: a token has 16 characters"),
        (f"acme {ACME}\nother {ACME}", "line 2: the token of another line"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_and_without_the_token(text: str, sentence: str) -> None:
    with pytest.raises(BadTokens, match=sentence) as caught:
        read_tokens(text, "tokens")
    assert ACME not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTokens, match="cannot be read: No such file"):
        Tokens(tmp_path / "none")


def test_tokens_are_known_by_themselves_or_by_their_digest(tokens_file: Path) -> None:
    tokens = Tokens(tokens_file)
    assert tokens.caller(ACME) == Caller("acme", is_admin=False)
    assert tokens.caller(OTHER) == Caller("other", is_admin=False)
    assert tokens.caller(ADMIN) == Caller("operations", is_admin=True)
    assert tokens.caller(DIGEST) is None
    assert tokens.caller(f"sha256:{DIGEST}") is None
