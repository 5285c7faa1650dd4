"""`python -m e2e.traces.screenshot FILE`: how a turn looks in Phoenix, as a PNG for people who have not seen it.

Headless Chromium on a real session: SGLang's engines where they are installed, else emulated ones.
"""

import argparse
import asyncio
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from dps_lab.local import MODEL
from e2e.traces.agent import SPAN as AGENT_SPAN
from e2e.traces.agent import TURNS, Agent, Turn
from e2e.traces.phoenix import Phoenix, phoenix
from e2e.traces.site import SGLANG, Engines, eventually, site
from e2e.traces.spans import Span

WINDOW = (1400, 930)
SCALE = 4 / 3
"""Of the page's pixels: letters stay sharp where the picture is shown smaller than it is."""
LEFT = 350
"""Where the trace begins; to the left is Phoenix's own menu."""
PATIENCE_SECONDS = 120
PAGE_MILLISECONDS = 20_000
"""Of the page's own clock, which runs ahead while nothing is being loaded."""


def chromium(url: str, *arguments: str) -> str:
    """What a headless Chromium writes to its standard output about a page.

    Raises OSError where there is none, subprocess.SubprocessError where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="dps-chromium-", ignore_cleanup_errors=True) as profile:
        command = ["chromium", "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += ["--no-sandbox"]  # root cannot have it, and the page is our own
        command += [f"--user-data-dir={profile}", f"--virtual-time-budget={PAGE_MILLISECONDS}"]
        command += [f"--window-size={WINDOW[0]},{WINDOW[1]}", *arguments, url]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS)
    return done.stdout


def photograph(url: str, file: Path) -> None:
    """Write the part of Phoenix's page that shows a trace, as a PNG. Raises as `chromium` does."""
    with tempfile.TemporaryDirectory(prefix="dps-screenshot-") as folder:
        whole = Path(folder) / "page.png"
        chromium(url, f"--screenshot={whole}", f"--force-device-scale-factor={SCALE}")
        with Image.open(whole) as page:
            trace = page.crop((round(LEFT * SCALE), round(46 * SCALE), page.width, page.height))
            trace.convert("P", palette=Image.Palette.ADAPTIVE).save(file, optimize=True)


async def route_of(server: Phoenix, turn: Turn) -> Span:
    """The span of a turn's decision, once it and the client's, which is sent last, have come to the backend."""

    async def look() -> Span:
        spans = {span.name: span for span in await server.spans(trace_id=turn.trace_id)}
        assert {AGENT_SPAN, "dps.route", f"chat {MODEL}"} <= spans.keys()
        return spans["dps.route"]

    return await eventually(look)


async def take(file: Path) -> None:
    """Play a session and photograph its second turn: it grew by little, so it was speculated on."""
    engines: Engines = "sglang" if (SGLANG / "bin/python").exists() else "emulated"
    async with phoenix() as server, site(engines, server) as running:
        agent = Agent(MODEL, server.grpc_url, "fix-the-build")
        turns = [
            await asyncio.to_thread(agent.take, running.stack.urls[0], text, stream=stream)
            for stream, text in TURNS
        ]
        await asyncio.to_thread(agent.close)
        route = await route_of(server, turns[1])
        await asyncio.to_thread(photograph, await server.page_of(route), file)


def main() -> None:
    """Take the screenshot."""
    parser = argparse.ArgumentParser(prog="python -m e2e.traces.screenshot", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/images/trace.png"))
    asyncio.run(take(parser.parse_args().file))


if __name__ == "__main__":
    main()
