"""Headless Chromium, controlled through its DevTools protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from dps_testkit.paths import ROOT
from dps_testkit.waiting import eventually_async, wait_until


def executable() -> str:
    """The path of Chromium, which is installed from Debian's package if it is missing. Raises CalledProcessError."""
    if shutil.which("chromium") is None:
        subprocess.run([ROOT / "e2e/install-packages", "chromium", "fonts-dejavu-core"], check=True)
    return shutil.which("chromium") or "chromium"


class Page:
    """An async context manager that runs Chromium with one page.

    `problems` are the messages of its console that are no information, and uncaught exceptions. `requests` are the
    URLs of all requests.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._sent = 0

    async def __aenter__(self) -> Self:
        command = [executable(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={self._folder}", "--no-first-run", "--disable-background-networking"]
        null = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            *command, "about:blank", stdout=null, stderr=null
        )
        port = await eventually_async(self._port)
        self._http = aiohttp.ClientSession()
        async with self._http.get(f"http://127.0.0.1:{port}/json/list") as response:
            target = next(each for each in await response.json() if each["type"] == "page")
        self._socket = await self._http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._http.close()
        self._process.terminate()
        await self._process.wait()

    async def send(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result. Raises RuntimeError if Chromium refuses it."""
        self._sent += 1
        reply = self._replies[self._sent] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._sent, "method": method, "params": parameters})
        return await reply

    async def open(self, url: str) -> None:
        """Open a URL, and wait until the page is loaded."""
        await self.send("Page.navigate", url=url)
        await self.wait(
            "location.href !== 'about:blank' && document.readyState === 'complete'", "the page is loaded"
        )

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise. Raises RuntimeError if it throws."""
        options = {"awaitPromise": True, "returnByValue": True}
        result = await self.send("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    async def rows(self, selector: str) -> list[list[str]]:
        """The texts of the cells of the table rows that a CSS selector matches."""
        rows = f"[...document.querySelectorAll({json.dumps(selector)})]"
        cells = "[...row.cells].map((cell) => cell.textContent)"
        found: list[list[str]] = await self.evaluate(f"{rows}.map((row) => {cells})")
        return found

    async def wait(self, expression: str, what: str) -> None:
        """Wait until the value of an expression is true."""

        async def holds() -> bool:
            return bool(await self.evaluate(expression))

        await wait_until(holds, what)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the color scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str) -> None:
        """Press a key, such as Enter, on the element that has the focus."""
        text = {"text": "\r"} if key == "Enter" else {}
        await self.send(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=13, **text
        )
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=13)

    async def screenshot(self, path: Path) -> None:
        """Write a PNG image of the window."""
        result = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(result["data"]))

    async def _port(self) -> int:
        """The port of the DevTools protocol. Raises AssertionError if Chromium does not listen yet."""
        found = await asyncio.to_thread(_first_line, self._folder / "DevToolsActivePort")
        assert found, "Chromium does not listen"
        return int(found)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if (number := event.get("id")) is not None:
                reply = self._replies.pop(number)
                if "error" in event:
                    reply.set_exception(RuntimeError(event["error"]["message"]))
                else:
                    reply.set_result(event["result"])
            else:
                self._notice(event["method"], event["params"])

    def _notice(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"]))
        elif (method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning")) or (
            method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning")
        ):
            self.problems.append(json.dumps(event))


def _first_line(path: Path) -> str:
    return path.read_text().partition("\n")[0] if path.exists() else ""
