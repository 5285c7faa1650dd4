"""`dps top`: show the load of both pools, as the gateways see it."""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

import aiohttp

from dps_gateway.commands.load_table import Interval, Reading, load_table

DEFAULT_URL: Final = "http://127.0.0.1:9090"
TIMEOUT_SECONDS: Final = 5.0
CLEAR_SCREEN: Final = "\x1b[H\x1b[2J"

Readings = Mapping[str, Reading | str]
"""The metrics of each gateway, by the URL of its admin port, or the reason why they could not be read."""


def main(argv: list[str]) -> int:
    """`dps top [URL ...]`.

    Exit status: 0 after Ctrl-C or --once, 1 if no gateway could be read, 2 if an argument is invalid.
    """
    parser = argparse.ArgumentParser(prog="dps top", description=__doc__)
    parser.add_argument(
        "urls",
        nargs="*",
        default=[DEFAULT_URL],
        metavar="URL",
        help=f"the admin port of each gateway replica (default: {DEFAULT_URL})",
    )
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="time between updates (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print the load of one interval and exit")
    arguments = parser.parse_args(argv)
    try:
        return asyncio.run(_watch(arguments.urls, arguments.interval, arguments.once))
    except KeyboardInterrupt:
        return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds from 0.1 to 3600")
    return seconds


async def _watch(urls: Sequence[str], interval_seconds: float, once: bool) -> int:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_SECONDS)) as client:
        before = await _read_all(client, urls)
        while True:
            await asyncio.sleep(interval_seconds)
            now = await _read_all(client, urls)
            errors = {url: reading for url, reading in now.items() if isinstance(reading, str)}
            if len(errors) == len(now):
                print("\n".join(f"dps top: {url}: {error}" for url, error in errors.items()), file=sys.stderr)
                return 1
            clear = CLEAR_SCREEN if sys.stdout.isatty() and not once else ""
            print(f"{clear}{_frame(before, now, errors)}", flush=True)
            if once:
                return 0
            before = now


def _frame(before: Readings, now: Readings, errors: Mapping[str, str]) -> str:
    intervals = [
        Interval(earlier, later)
        for url, later in now.items()
        if isinstance(later, Reading) and isinstance(earlier := before[url], Reading)
    ]
    unavailable = [f"unavailable: {url}: {error}" for url, error in errors.items()]
    return "\n".join(
        [f"gateways: {len(now) - len(errors)} of {len(now)}", "", load_table(intervals), *unavailable, ""]
    )


async def _read_all(client: aiohttp.ClientSession, urls: Sequence[str]) -> Readings:
    readings = await asyncio.gather(*(_read(client, url) for url in urls))
    return dict(zip(urls, readings, strict=True))


async def _read(client: aiohttp.ClientSession, url: str) -> Reading | str:
    try:
        async with client.get(f"{url.rstrip('/')}/metrics") as response:
            if response.status != 200:
                return f"/metrics answered {response.status}; give the URL of the admin port"
            return Reading.of(await response.text(), time.monotonic())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
