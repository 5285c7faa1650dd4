"""A page in headless Chromium, controlled through the DevTools protocol."""

import asyncio
import base64
import itertools
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from dps_local.processes import Child, free_ports

START_SECONDS = 120.0
ANSWER_SECONDS = 60.0


class Page:
    """An open page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    async def evaluate(self, script: str) -> Any:
        """Evaluate a JavaScript expression on the page. Raises RuntimeError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def capture(self, area: dict[str, float], scale: float) -> bytes:
        """A PNG of an area (x, y, width and height in CSS pixels), enlarged by `scale`."""
        clip = {**area, "scale": scale}
        answer = await self.call("Page.captureScreenshot", format="png", clip=clip)
        return base64.b64decode(answer["data"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result. Raises RuntimeError if it fails, TimeoutError if it hangs."""
        number = next(self._numbers)
        async with asyncio.timeout(ANSWER_SECONDS):
            await self._socket.send_json({"id": number, "method": method, "params": parameters})
            while (message := await self._socket.receive_json()).get("id") != number:
                pass  # an event, not the answer
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result


@asynccontextmanager
async def opened(url: str, width: int, height: int) -> AsyncIterator[Page]:
    """Open a URL in a browser window of this size in pixels. Does not wait until the page is rendered.

    Raises ChildError if Chromium does not start.
    """
    with tempfile.TemporaryDirectory(prefix="dps-chromium-", ignore_cleanup_errors=True) as folder:
        port = free_ports(1)[0]
        command = ["chromium", "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += ["--no-sandbox"]  # the sandbox does not work for root, and the page is trusted
        command += [f"--window-size={width},{height}", f"--remote-debugging-port={port}"]
        command += [f"--user-data-dir={folder}/profile", url]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            browser = Child("chromium", command, Path(folder) / "log", lambda: _has_page(http))
            browser.start()
            try:
                await browser.wait_ready(START_SECONDS)
                (target,) = await _pages(http)
                async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                    await page.call("Emulation.setDeviceMetricsOverride", **size)
                    yield page
            finally:
                await browser.stop()


async def _pages(http: aiohttp.ClientSession) -> list[dict[str, Any]]:
    async with http.get("/json/list") as answer:
        targets: list[dict[str, Any]] = await answer.json(content_type=None)
        return [target for target in targets if target["type"] == "page"]


async def _has_page(http: aiohttp.ClientSession) -> bool:
    try:
        return bool(await _pages(http))
    except aiohttp.ClientError:
        return False
