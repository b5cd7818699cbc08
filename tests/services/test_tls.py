"""TLS between clients and scheduler: who is trusted, who is refused, and what a renewal changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.client import AsyncClient, ClientFiles, OctavoError, ServerUnavailable
from octavo.tls import BadTLSFiles, ClientCredentials, ServerFiles, server_credentials

from tests.services.certificates import Authority, Pair
from tests.services.fake_engine import FakeEngine, answer, text_ids
from tests.services.harness import Running, serving


def client_of(running: Running, **files: Path | None) -> AsyncClient:
    return AsyncClient(running.address, timeout=10, tls=ClientFiles(**files))


def server_of(pair: Pair, **more: object) -> dict[str, object]:
    return {"tls_cert": pair.cert, "tls_key": pair.key, **more}


async def test_a_client_that_trusts_the_root_is_answered(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    engine = FakeEngine(script=answer(*text_ids("Hello")))
    async with (
        serving(engine, **server_of(authority.issue("scheduler"))) as running,
        client_of(running, ca=authority.ca) as client,
    ):
        assert (await client.complete(text="Hi")).text == "Hello"


async def test_a_name_other_than_the_address_is_verified(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(**server_of(authority.issue("scheduler"))) as running:
        tls = ClientFiles(ca=authority.ca)
        async with AsyncClient(running.address, timeout=10, tls=tls, tls_name="scheduler") as client:
            assert await client.health()
        async with AsyncClient(running.address, timeout=10, tls=tls, tls_name="another") as client:
            with pytest.raises(ServerUnavailable):
                await client.health()


async def test_a_client_of_another_root_and_one_without_tls_are_not_answered(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    async with (
        serving(**server_of(authority.issue("scheduler"))) as running,
        client_of(running, ca=other.ca) as client,
    ):
        with pytest.raises(ServerUnavailable):
            await client.health()
        async with AsyncClient(running.address, timeout=10) as client:
            with pytest.raises(OctavoError):
                await client.health()


async def test_where_clients_must_show_a_certificate_only_those_are_answered(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    mine, foreign = authority.issue("me"), other.issue("stranger")
    server = server_of(authority.issue("scheduler"), tls_client_ca=authority.ca)
    async with (
        serving(**server) as running,
        client_of(running, ca=authority.ca, cert=mine.cert, key=mine.key) as client,
    ):
        assert await client.health()
        for files in ({}, {"cert": foreign.cert, "key": foreign.key}):
            async with client_of(running, ca=authority.ca, **files) as client:
                with pytest.raises(ServerUnavailable):
                    await client.health()


async def test_a_renewed_certificate_is_shown_to_the_next_connection(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    pair = old.issue("scheduler")
    async with serving(**server_of(pair)) as running, client_of(running, ca=old.ca) as client:
        assert await client.health()
        new.issue("scheduler")
        async with client_of(running, ca=new.ca) as later:
            assert await later.health()
        assert await client.health()  # its connection goes on
        pair.key.write_text("half written")
        async with client_of(running, ca=new.ca) as later:
            assert await later.health()


async def test_health_is_answered_in_plain_on_its_own_port_and_nothing_else(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("scheduler")
    async with (
        serving(**server_of(pair, health_port=0)) as running,
        AsyncClient(f"127.0.0.1:{running.server.health_port}", timeout=10) as client,
    ):
        assert await client.health("liveness")
        with pytest.raises(OctavoError, match="UNIMPLEMENTED"):
            await client.model()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(BadTLSFiles, match=r"one\.pem and .*other\.key are no certificate and its key"):
        server_credentials(ServerFiles(one.cert, other.key))
    with pytest.raises(BadTLSFiles, match=r"missing\.pem cannot be read: No such file"):
        server_credentials(ServerFiles(tmp_path / "missing.pem", one.key))
    with pytest.raises(BadTLSFiles, match=r"one\.key holds no certificates"):
        ClientCredentials(ClientFiles(ca=one.key))
    with pytest.raises(BadTLSFiles, match="a certificate needs its key"):
        ClientCredentials(ClientFiles(cert=one.cert))


def test_credentials_of_a_client_change_with_its_files_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("me")
    credentials = ClientCredentials(ClientFiles(authority.ca, pair.cert, pair.key))
    first = credentials.current()
    assert credentials.current() is first
    pair.key.write_text("half written")
    assert credentials.current() is first
    authority.issue("me")
    assert credentials.current() is not first
