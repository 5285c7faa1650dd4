"""`python -m e2e.traces.screenshot FILE`: write a PNG of one turn's trace in Phoenix, for the documentation.

It sends a session to SGLang engines on the CPU and opens the trace in headless Chromium.
"""

import argparse
import asyncio
import io
from pathlib import Path

from PIL import Image

from dps_local.stack import MODEL, START_SECONDS
from dps_testkit.waiting import eventually_async
from e2e.real_sglang import local_sglang
from e2e.traces.agent import SPAN as AGENT_SPAN
from e2e.traces.agent import TURNS, Agent, Turn
from e2e.traces.browser import opened
from e2e.traces.phoenix import Phoenix, phoenix
from e2e.traces.spans import Span
from e2e.traces.traced_stack import traced_stack

WINDOW = (1400, 930)
WIDTH = 1400
"""Width of the PNG. It is scaled up, so that text stays sharp when it is shown smaller."""
TRACE = """(() => {
  const {x, y, width, height} = document.querySelector('[role="dialog"]').getBoundingClientRect();
  return {x, y, width, height};
})()"""
"""The area of the trace, without Phoenix's navigation and lists."""


async def screenshot(url: str, file: Path, texts: set[str]) -> None:
    """Write a PNG of the trace on a page of Phoenix, as soon as the page shows all `texts`.

    Raises AssertionError if a text does not appear, and ChildError if Chromium does not start.
    """
    async with opened(url, *WINDOW) as page:

        async def rendered() -> None:
            text_on_page = await page.evaluate("document.body?.innerText ?? ''")
            assert {text for text in texts if text not in text_on_page} == set()

        await eventually_async(rendered, START_SECONDS)
        area = await page.evaluate(TRACE)
        png = await page.capture(area, WIDTH / area["width"])
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("P", palette=Image.Palette.ADAPTIVE).save(file, optimize=True)


async def route_of(server: Phoenix, turn: Turn) -> Span:
    """The `dps.route` span of a turn, once it and the client's span, which is exported last, have arrived."""

    async def arrived() -> Span:
        spans = {span.name: span for span in await server.spans(trace_id=turn.trace_id)}
        assert {AGENT_SPAN, "dps.route", f"chat {MODEL}"} <= spans.keys()
        return spans["dps.route"]

    return await eventually_async(arrived, START_SECONDS)


async def run(file: Path) -> None:
    """Send a session and take a screenshot of its second turn, which grew little and was routed to speculation."""
    local_sglang.install()
    async with phoenix() as server, traced_stack("sglang", server) as running:
        agent = Agent(MODEL, server.grpc_url, "fix-the-build")
        turns = [
            await asyncio.to_thread(agent.send, running.stack.urls[0], text, stream=stream)
            for stream, text in TURNS
        ]
        await asyncio.to_thread(agent.close)
        route = await route_of(server, turns[1])
        await screenshot(await server.page_of(route), file, set(route.stable_attributes()))


def main() -> None:
    """Take the screenshot."""
    parser = argparse.ArgumentParser(prog="python -m e2e.traces.screenshot", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/images/trace.png"))
    asyncio.run(run(parser.parse_args().file))


if __name__ == "__main__":
    main()
