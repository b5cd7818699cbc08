"""A headless Chromium, driven over its DevTools protocol: one page, its scripts' values, its picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One tab. What its console and its network complain of is kept."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)  # that it asked for
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._ids)
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                message = await self.socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message["error"]
                    return message["result"]  # type: ignore[no-any-return]
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.complaints.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.addresses.append(parameters["request"]["url"])

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression, as JSON; a promise is awaited."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not await self.value(expression):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def resize(self, width: int, height: int, *, dark: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        """The whole page, as far down as it goes."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))  # noqa: ASYNC240


@contextlib.asynccontextmanager
async def browse(browser: str, url: str) -> AsyncIterator[Page]:
    """The page at `url`, in a browser of its own that ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0",
            f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(START_SECONDS):
                while not (port_file.exists() and "\n" in port_file.read_text()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    tabs = [tab for tab in await response.json() if tab["type"] == "page"]
                async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Runtime", "Log", "Network", "Page"):
                        await page.call(f"{domain}.enable")
                    await page.call("Page.navigate", url=url)
                    yield page
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
