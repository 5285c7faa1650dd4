"""`dps top`: show the pools, and decisions as they are made, in a terminal."""

import argparse
import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import aiohttp
import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

DEFAULT_URL: Final = "http://127.0.0.1:9090"
TOKEN: Final = "DPS_ADMIN_TOKEN"
"""The environment variable with the token of the admin port, if it requires one."""

TIMEOUT: Final = aiohttp.ClientTimeout(sock_connect=5, sock_read=15)
UPDATE_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 1.0
MAX_RECORDS: Final = 1000
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
WIDE_COLUMNS: Final = 120
"""The width of terminals on which further columns are shown."""

STYLES: Final = {"speculative": "blue", "greedy": "yellow"}


@dataclass
class Gateway:
    """One gateway replica."""

    url: str
    state: dict[str, Any] | None = None
    """The last state that it has sent."""
    problem: str | None = "no answer yet"
    """Why it cannot be read at present."""
    last_event_id: str = ""


@dataclass
class Screen:
    """What is shown or printed."""

    gateways: list[Gateway]
    session: str | None
    """The session, or the request, to which the records are restricted."""
    as_json: bool
    once: bool
    records: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))

    def wants(self, record: dict[str, Any]) -> bool:
        """Whether a record belongs to the session, if one is selected."""
        ids = (record["session"], record["client_session"], record["request_id"])
        return self.session is None or self.session in ids

    def add(self, records: list[dict[str, Any]]) -> None:
        """Print the records as JSON, or keep them."""
        wanted = [record for record in records if self.wants(record)]
        if self.as_json and wanted:
            print(b"\n".join(map(orjson.dumps, wanted)).decode(), flush=True)
        self.records.extend(wanted)


def main(argv: list[str]) -> int:
    """`dps top [URL ...]`.

    Exit status: 0 after Ctrl-C or --once, 1 if no gateway could be read, 2 if an argument is invalid.
    """
    epilog = f"If the admin port requires a token, set {TOKEN}."
    parser = argparse.ArgumentParser(prog="dps top", description=__doc__, epilog=epilog)
    help_text = f"the admin port of each gateway replica (default: {DEFAULT_URL})"
    parser.add_argument("urls", nargs="*", default=[DEFAULT_URL], metavar="URL", help=help_text)
    help_text = "only this session: the id that the client sends, x-dps-session, or a request id"
    parser.add_argument("--session", metavar="ID", help=help_text)
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each decision")
    parser.add_argument("--once", action="store_true", help="print what is known now, and exit")
    arguments = parser.parse_args(argv)
    gateways = [Gateway(url.rstrip("/")) for url in arguments.urls]
    try:
        asyncio.run(_run(Screen(gateways, arguments.session, arguments.json, arguments.once)))
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the process that reads the output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 1 if all(each.problem is not None for each in gateways) else 0


async def _run(screen: Screen) -> None:
    """Read all gateways and show them; with `once`, until each has sent the decisions that were made before."""
    headers = {"Authorization": f"Bearer {os.environ[TOKEN]}"} if os.environ.get(TOKEN) else {}
    console = Console(highlight=False)
    async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as client:
        reading = asyncio.gather(*(_follow(client, screen, each) for each in screen.gateways))
        if screen.once or screen.as_json:
            await reading
            if not screen.as_json:
                console.print(rendered(screen, console.width, None))
            return
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while not reading.done():
                live.update(rendered(screen, console.width, console.height), refresh=True)
                await asyncio.wait([reading], timeout=UPDATE_SECONDS)


async def _follow(client: aiohttp.ClientSession, screen: Screen, gateway: Gateway) -> None:
    """Read a gateway's stream, and connect again whenever it ends."""
    while True:
        try:
            await _read(client, screen, gateway)
        except (aiohttp.ClientError, TimeoutError) as error:
            gateway.problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if gateway.problem is not None and (screen.as_json or screen.once):
            print(f"dps top: {gateway.url}: {gateway.problem}", file=sys.stderr)
        if screen.once:
            return
        await asyncio.sleep(RETRY_SECONDS)


async def _read(client: aiohttp.ClientSession, screen: Screen, gateway: Gateway) -> None:
    headers = {"Last-Event-ID": gateway.last_event_id} if gateway.last_event_id else {}
    url = f"{gateway.url}/live"
    async with client.get(url, headers=headers, read_bufsize=MAX_EVENT_BYTES) as response:
        if response.status != 200:
            gateway.problem = f"/live answered {response.status}; give the URL of the admin port, and {TOKEN}"
            return
        async for name, number, data in _events(response):
            gateway.problem = None
            if name == "state":
                gateway.state = data
            else:
                gateway.last_event_id = number
                screen.add(data)
            if screen.once and (name == "decisions" or not data["decisions"]):
                return
    gateway.problem = "the gateway has ended the stream"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str, Any]]:
    """The events of a stream: the name, the id and the data."""
    fields: dict[bytes, bytes] = {}
    async for line in response.content:
        name, _, value = line.rstrip(b"\n").partition(b": ")
        if name:
            fields[name] = value
        elif fields:
            yield fields[b"event"].decode(), fields.get(b"id", b"").decode(), orjson.loads(fields[b"data"])
            fields = {}


def rendered(screen: Screen, width: int, height: int | None) -> RenderableType:
    """The tables for a terminal of this size; height None for no limit."""
    parts: list[RenderableType] = []
    lines = 6
    for gateway in screen.gateways:
        if gateway.problem is not None:
            parts.append(f"[red]{escape(gateway.url)}: {escape(gateway.problem)}")
        if (state := gateway.state) is not None:
            parts.append(_summary(gateway.url, state, screen))
            lines += 4
            if screen.session is None:
                parts.append(table := _pools(state))
                lines += 3 + table.row_count
    shown = list(screen.records)[-max(5, height - lines) if height else 0 :]
    parts.append(_decisions(shown, wide=width >= WIDE_COLUMNS))
    return Group(*parts)


def _summary(url: str, state: dict[str, Any], screen: Screen) -> str:
    threshold = "∞" if state["thresholdTokens"] is None else state["thresholdTokens"]
    phases = [request["phase"] for request in state["inProgress"] if screen.wants(request)]
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    text = f"{url}: {state['policy']}, τ = {threshold}; redis: {state['redis']}; in progress: {counts or '-'}"
    error = state["configError"]
    return escape(text) + (f"\n[red]configuration refused: {escape(error)}" if error else "")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _pools(state: dict[str, Any]) -> Table:
    table = _table("pool", "replica", "state", "in flight", "queued", "TTFT", "TPOT")
    for name, pool in state["pools"].items():
        ready = f"{pool['readyReplicas']} of {len(pool['replicas'])} ready"
        times = (pool["timeToFirstTokenSeconds"], pool["timePerOutputTokenSeconds"])
        load = (str(pool["inFlight"]), str(pool["queued"]))
        table.add_row(_pool(name), "", ready, *load, *map(_seconds, times))
        for replica in pool["replicas"]:
            style = "" if replica["ready"] else "red"
            table.add_row(
                "", _address(replica["url"]), replica["state"], str(replica["inFlight"]), style=style
            )
    return table


def _decisions(records: list[dict[str, Any]], *, wide: bool) -> Table:
    """The records, newest first."""
    further = ("TTFT", "replica", "history") if wide else ()
    table = _table("time", "session", "turn", "ΔL", "L", "pool", "reason", "total", "outcome", *further)
    for record in sorted(records, key=lambda record: -float(record["time"])):
        session = record["client_session"] or record["session"] or record["request_id"]
        counts = (record["turn"], record["delta_tokens"], record["prompt_tokens"])
        complete = record["outcome"] == "complete"
        table.add_row(
            datetime.fromtimestamp(record["time"]).astimezone().strftime("%H:%M:%S"),
            escape(session[-32 if wide else -11 :]),
            *("-" if count is None else str(count) for count in counts),
            _pool(record["pool"]),
            record["reason"] or "-",
            _seconds(record["total_seconds"]),
            "ok" if complete else f"[red]{record['outcome']} {record['status']}",
            *((_seconds(record["first_token_seconds"]),) if wide else ()),
            *((_address(record["replica"]), record["history"]) if wide else ()),
        )
    return table


def _address(url: str | None) -> str:
    return (url or "-").rpartition("/")[2]


def _pool(name: str | None) -> str:
    return f"[{STYLES[name]}]{name}[/]" if name else "-"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"
