"""The HTTP port: metrics, and whom it refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from scheduler.config import SchedulerConfig
from scheduler.server import CannotListen, Server
from scheduler.web import is_private_name
from tests.services.fake_engine import FakeEngine
from tests.services.harness import Running, serving


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    async with serving(http_port=0) as running:
        yield running


@pytest_asyncio.fixture
async def http(running: Running) -> AsyncIterator[aiohttp.ClientSession]:
    assert running.server.web is not None
    async with aiohttp.ClientSession(running.server.web.url) as session:
        yield session


async def test_metrics_are_served_for_prometheus(running: Running, http: aiohttp.ClientSession) -> None:
    await running.generate()
    running.engine.metrics.refresh(running.engine.load(), stream_pause=0.0)
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert 'octavo_num_requests_running{executor="here:1"} 3.0' in lines
    assert "octavo_num_requests_waiting 2.0" in lines
    assert 'octavo_kv_cache_usage_perc{executor="here:1"} 0.6' in lines
    assert "octavo_time_to_first_token_seconds_count 1.0" in lines
    assert 'octavo_requests_total{reason="stop"} 1.0' in lines
    assert "octavo_generation_tokens_total 3.0" in lines


async def test_openmetrics_is_served_to_who_accepts_it(http: aiohttp.ClientSession) -> None:
    async with http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as response:
        assert response.content_type == "application/openmetrics-text"
        assert (await response.text()).endswith("# EOF\n")


async def test_it_tells_that_the_process_lives(http: aiohttp.ClientSession) -> None:
    async with http.get("/healthz") as response:
        assert (response.status, await response.text()) == (200, "ok\n")


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/healthz", "GET", {}, 200),
        ("/nothing", "GET", {}, 404),
        ("/metrics", "POST", {}, 405),
        ("/metrics", "GET", {"Host": "rebound.example:9090"}, 421),
        ("/metrics", "GET", {"Host": ""}, 421),
        ("/metrics", "GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ("/metrics", "GET", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
        ("/metrics", "GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ("/metrics", "GET", {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
    ],
)
async def test_every_answer_carries_the_headers_and_strangers_get_nothing(
    http: aiohttp.ClientSession, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    async with http.request(method, path, headers=headers) as response:
        assert response.status == status
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in response.headers
        assert ("octavo_" in await response.text()) == (path == "/metrics" and status == 200)


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("127.0.0.1:9090", True),
        ("[::1]:9090", True),
        ("10.1.2.3", True),
        ("localhost:9090", True),
        ("octavo-scheduler", True),
        ("octavo-scheduler.octavo.svc.cluster.local:9090", True),
        ("gpu7.internal.", True),
        ("serve.example.org:9090", True),  # as it was told to listen on
        ("other.example.org:9090", False),
        ("127.0.0.1.example.org", False),
        ("notlocal", True),
        ("notlocal.example", False),
        ("evil-internal", True),
        ("evil-internal.com", False),
        ("", False),
    ],
)
def test_names_that_strangers_can_register_are_refused(host: str, private: bool) -> None:
    assert is_private_name(host, "serve.example.org") is private


async def test_a_port_that_is_taken_is_one_sentence(running: Running) -> None:
    assert running.server.web is not None
    port = running.server.web.port
    other = Server(SchedulerConfig(executors=("fake:1",), port=0, http_port=port), FakeEngine())
    with pytest.raises(CannotListen, match=f"cannot serve HTTP on port {port}: "):
        await other.start()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
async def test_who_sends_what_is_no_request_is_told_so_and_fills_no_log(
    running: Running, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    """Each was an error with its trace in the log."""
    assert running.server.web is not None
    with caplog.at_level(logging.INFO):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.web.port)
        writer.write(garbage)
        assert (await reader.readline()).startswith(b"HTTP/1.0 400 ")
        writer.close()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("aiohttp")] == []
