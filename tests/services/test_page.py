"""The page and its stream of frames: what they hold, who gets them, and what they never cost."""

from __future__ import annotations

import array
import asyncio
import base64
import json
import re
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from html.parser import HTMLParser

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from scheduler import viewers as viewers_module
from scheduler.frame import frame_of
from scheduler.inspection import Inspection, Inspector
from scheduler.outputs import ExecutorLoad, ExecutorState, WaitingRequests
from scheduler.pace import Pace
from scheduler.viewers import MAX_VIEWERS, Viewers
from scheduler.web import PAGE, PAGE_FOLDER
from tests.page.browser import browse, find_browser
from tests.page.looks import check_page
from tests.page.traffic import served
from tests.services.fake_engine import FakeEngine
from tests.services.harness import Running, serving, until


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    async with serving(http_port=0) as running:
        yield running


@pytest_asyncio.fixture
async def http(running: Running) -> AsyncIterator[aiohttp.ClientSession]:
    assert running.server.web is not None
    async with aiohttp.ClientSession(running.server.web.url) as session:
        yield session


def message_of(frame: bytes) -> dict[str, object]:
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2, "one line of data"
    return json.loads(frame.removeprefix(b"data: "))  # type: ignore[no-any-return]


async def next_frame(response: aiohttp.ClientResponse) -> dict[str, object]:
    return message_of(await response.content.readuntil(b"\n\n"))


# --- frames


def test_a_frame_tells_who_holds_which_block() -> None:
    message = message_of(frame_of(FakeEngine().inspect()))
    [executor] = message["executors"]  # type: ignore[misc, attr-defined]
    packed = zlib.decompress(base64.b64decode(executor["columns"]))
    assert executor["blocks"] == 11
    shorts = array.array("H", packed[:44])
    assert list(shorts[:11]) == [0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    assert list(shorts[11:]) == [0, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert list(packed[44:]) == [0, 16, 2, 2, 16, 0, 0, 0, 0, 0, 0]
    assert executor["sequences"] == [
        [7, 7, 0, 17, 19, 18, 0, 2, 0, 0, "ask-1", "acme"],
        [8, 7, 0, 17, 19, 18, 0, 2, 0, 1, "ask-1", "acme"],
    ]
    assert executor["steps"] == [[1, 0, 1, 17, 1, 0, 0, 0.25], [2, 2, 0, 0, 0, 0, 1, None]]
    assert message["queue"]["waiting"] == [[2, 0, "default", "no free block"]]  # type: ignore[index]


def test_an_executor_that_has_not_joined_has_no_blocks() -> None:
    seen = FakeEngine().inspect()
    away = ExecutorLoad("there:2", "", ExecutorState.REFUSED, "another model")
    seen = replace(seen, load=replace(seen.load, executors=(away,)), executors=())
    assert message_of(frame_of(seen))["executors"] == [
        {"target": "there:2", "state": "refused", "reason": "another model"}
    ]


# --- the stream


async def test_the_stream_goes_on_and_holds_no_word_of_a_client(running: Running, http: aiohttp.ClientSession) -> None:
    running.engine.change(waiting=(WaitingRequests("acme", 0, 2, "no free block"),))
    async with http.get("/events") as response:
        assert response.content_type == "text/event-stream"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in response.headers
        frames = [await next_frame(response) for _ in range(3)]
    assert [frame["seconds"] for frame in frames] == sorted({frame["seconds"] for frame in frames})
    assert "acme" not in repr(frames)
    assert "ask-1" not in repr(frames)


async def test_names_are_shown_to_who_asks_for_them() -> None:
    async with serving(http_port=0, http_names=True) as running:
        assert running.server.web is not None
        async with (
            aiohttp.ClientSession(running.server.web.url) as http,
            http.get("/events") as response,
        ):
            frame = await next_frame(response)
    assert "acme" in repr(frame)
    assert "ask-1" in repr(frame)


async def test_nobody_looks_and_nothing_is_made(running: Running, http: aiohttp.ClientSession) -> None:
    assert running.server.web is not None
    assert running.engine.inspections == 0
    async with http.get("/events") as response:
        await next_frame(response)
        assert len(running.server.web.viewers) == 1
    await until(lambda: len(running.server.web.viewers) == 0)  # type: ignore[union-attr]
    made = running.engine.inspections
    assert running.server.web.viewers._ticking is None
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "page" and not task.cancelling()]
    assert running.engine.inspections == made


async def test_one_picture_is_made_for_all_and_one_viewer_too_many_is_told_when_to_come_back(
    running: Running, http: aiohttp.ClientSession
) -> None:
    responses = [await http.get("/events") for _ in range(MAX_VIEWERS)]
    async with http.get("/events") as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
    frames = [await next_frame(response) for response in responses]
    assert len({frame["seconds"] for frame in frames}) < MAX_VIEWERS / 2, "most have seen the same picture"
    responses[0].close()
    await until(lambda: len(running.server.web.viewers) < MAX_VIEWERS)  # type: ignore[union-attr]
    async with http.get("/events") as taken:
        assert taken.status == 200
    for response in responses:
        response.close()


async def test_a_stream_ends_when_the_server_stops(running: Running, http: aiohttp.ClientSession) -> None:
    async with http.get("/events") as response:
        await next_frame(response)
        running.server.stop()
        await response.read()
        assert response.content.at_eof()
    await running.over


def application(inspect: Callable[[], Inspection], stall_seconds: float) -> tuple[web.Application, Viewers]:
    viewers = Viewers(Inspector(inspect), Pace(), names=True, headers={}, stall_seconds=stall_seconds)
    app = web.Application()
    app.router.add_get("/events", viewers.serve)
    return app, viewers


async def test_who_takes_nothing_is_dropped_and_the_others_see_every_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers_module, "TICK_SECONDS", 0.01)
    engine = FakeEngine()

    def large() -> Inspection:
        seen = engine.inspect()
        return replace(seen, model="x" * 400_000)  # soon more than the sockets' buffers hold

    app, viewers = application(large, stall_seconds=0.5)
    async with TestClient(TestServer(app)) as client:
        stuck = socket.create_connection(("127.0.0.1", client.port or 0))
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: len(viewers) == 1)
        async with client.get("/events") as response:
            seen = 0
            while len(viewers) == 2 or seen == 0:
                chunk = await response.content.readany()
                seen += chunk.count(b"data: ")
            assert len(viewers) == 1
        stuck.close()


async def test_a_fault_in_a_picture_ends_the_stream_and_the_next_viewer_begins_anew() -> None:
    engine, faults = FakeEngine(), [ValueError("a bug")]

    def inspect() -> Inspection:
        if faults:
            raise faults.pop()
        return engine.inspect()

    app, viewers = application(inspect, stall_seconds=10.0)
    async with TestClient(TestServer(app)) as client:
        async with client.get("/events") as response:
            assert await response.read() == b""
        await until(lambda: len(viewers) == 0)
        async with client.get("/events") as response:
            assert (await next_frame(response))["model"] == "tiny"


def test_frames_come_more_rarely_while_the_loop_is_late_and_when_they_cost_much() -> None:
    pace = Pace()
    viewers = Viewers(Inspector(FakeEngine().inspect), pace, names=False, headers={})
    assert viewers._pause(spent=0.001) == 0.25
    assert viewers._pause(spent=0.02) == 2.0
    pace.pause = 0.5
    assert viewers._pause(spent=0.001) == 4.0


# --- the page


class References(HTMLParser):
    """Everything that a browser would fetch or follow, and what the Content-Security-Policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.addresses += [str(given[name]) for name in ("src", "href", "action", "srcset") if name in given]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_the_page_asks_for_nothing_but_its_own_files_and_has_nothing_inline() -> None:
    page = References()
    page.feed((PAGE_FOLDER / "index.html").read_text())
    assert set(page.addresses) == {path for path, _, _ in PAGE} - {"/"}
    assert page.inline == []
    for _, name, _ in PAGE:
        text = (PAGE_FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?:|//[a-z0-9-]+\.[a-z]|url\(|@import|\bimport\b", text) == []
    script = (PAGE_FOLDER / "page.js").read_text()
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script) == []
    assert re.findall(r'new EventSource\("([^"]*)"\)|fetch\(', script) == ["/events"]


@pytest.mark.parametrize(("path", "name", "content_type"), PAGE)
async def test_its_files_are_served(http: aiohttp.ClientSession, path: str, name: str, content_type: str) -> None:
    async with http.get(path) as response:
        assert (response.status, response.content_type, response.charset) == (200, content_type, "utf-8")
        assert await response.read() == (PAGE_FOLDER / name).read_bytes()
        assert "script-src 'self'" in response.headers["Content-Security-Policy"]


async def test_in_a_browser_the_grid_shows_every_block_and_colours_change() -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("NO CHROMIUM: the page is not tested in a browser; install one, or run `python -m tests.page`")
    async with served(step_ms=40) as here, browse(browser, here.url) as page:
        await page.resize(1280, 900, dark=False)
        await check_page(page, here.url, here.num_blocks)
