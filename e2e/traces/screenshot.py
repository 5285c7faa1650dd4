"""`python -m e2e.traces.screenshot FILE`: how a turn looks in Phoenix, as a PNG for people who have not seen it.

Headless Chromium on a real session: SGLang's engines where they are installed, else emulated ones.
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
from e2e.traces.site import site
from e2e.traces.spans import Span

WINDOW = (1400, 930)
WIDTH = 1400
"""Of the picture. More than the page's own pixels, so that letters stay sharp where it is shown smaller."""
TRACE = """(() => {
  const {x, y, width, height} = document.querySelector('[role="dialog"]').getBoundingClientRect();
  return {x, y, width, height};
})()"""
"""Where on the page the trace is; Phoenix's own menu and lists are around and under it."""


async def photograph(url: str, file: Path, wanted: set[str]) -> None:
    """Write the part of Phoenix's page that shows a trace, as a PNG, once all that is wanted is to be read there.

    Raises AssertionError if it does not come, ChildError if there is no Chromium.
    """
    async with opened(url, *WINDOW) as page:

        async def look() -> None:
            seen = await page.evaluate("document.body?.innerText ?? ''")
            assert {text for text in wanted if text not in seen} == set()

        await eventually_async(look, START_SECONDS)
        area = await page.evaluate(TRACE)
        png = await page.picture(area, WIDTH / area["width"])
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("P", palette=Image.Palette.ADAPTIVE).save(file, optimize=True)


async def route_of(server: Phoenix, turn: Turn) -> Span:
    """The span of a turn's decision, once it and the client's, which is sent last, have come to the backend."""

    async def look() -> Span:
        spans = {span.name: span for span in await server.spans(trace_id=turn.trace_id)}
        assert {AGENT_SPAN, "dps.route", f"chat {MODEL}"} <= spans.keys()
        return spans["dps.route"]

    return await eventually_async(look, START_SECONDS)


async def take(file: Path) -> None:
    """Play a session and photograph its second turn: it grew by little, so it was speculated on."""
    local_sglang.install()
    async with phoenix() as server, site("sglang", server) as running:
        agent = Agent(MODEL, server.grpc_url, "fix-the-build")
        turns = [
            await asyncio.to_thread(agent.take, running.stack.urls[0], text, stream=stream)
            for stream, text in TURNS
        ]
        await asyncio.to_thread(agent.close)
        route = await route_of(server, turns[1])
        await photograph(await server.page_of(route), file, set(route.said()))


def main() -> None:
    """Take the screenshot."""
    parser = argparse.ArgumentParser(prog="python -m e2e.traces.screenshot", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/images/trace.png"))
    asyncio.run(take(parser.parse_args().file))


if __name__ == "__main__":
    main()
