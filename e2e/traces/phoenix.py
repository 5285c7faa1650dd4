"""Arize Phoenix as a child process, and the spans in it, through its REST API."""

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from dps_local.processes import Child, free_ports
from e2e.traces.spans import Span

VENV = Path(os.environ.get("PHOENIX_VENV", Path.home() / ".cache/dps-router/phoenix"))
PROJECT = "default"
START_SECONDS = 300.0
_QUIET = {
    "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
    "PHOENIX_ENABLE_MCP_SERVER": "false",
    "PHOENIX_TELEMETRY_ENABLED": "false",
}
"""Disables outgoing requests and features that the tests do not use."""


class Phoenix:
    """A server on loopback with its own working directory."""

    def __init__(self, folder: Path) -> None:
        port, grpc_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        """Base URL of the user interface, the REST API and OTLP/HTTP."""
        self.grpc_url = f"http://127.0.0.1:{grpc_port}"
        """OTLP/gRPC."""
        environment = _QUIET | {
            "PHOENIX_WORKING_DIR": str(folder),
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(port),
            "PHOENIX_GRPC_PORT": str(grpc_port),
        }
        command = [str(VENV / "bin/phoenix"), "serve"]
        self.child = Child("phoenix", command, folder / "phoenix.log", self._answers, environment)

    async def spans(self, **filters: str) -> list[Span]:
        """The spans that match all filters: `trace_id=…`, `name=…`, `attribute="key:value"`."""
        found = await self._pages(f"/v1/projects/{PROJECT}/spans", {"limit": "1000", **filters})
        return [
            Span(
                item["name"],
                item["context"]["trace_id"],
                item["context"]["span_id"],
                item["parent_id"],
                item["start_time"],
                item["attributes"],
            )
            for item in found
        ]

    async def conversation(self, conversation_id: str) -> list[str]:
        """The trace ids of a conversation, ordered by time; empty if the conversation is unknown."""
        sessions = await self._pages(f"/v1/projects/{PROJECT}/sessions", {"limit": "1000"})
        traces = [
            trace for item in sessions if item["session_id"] == conversation_id for trace in item["traces"]
        ]
        return [trace["trace_id"] for trace in sorted(traces, key=lambda trace: str(trace["start_time"]))]

    async def _pages(self, path: str, query: dict[str, str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self._get(path, query | ({"cursor": cursor} if cursor else {}))
            found += page["data"]
            cursor = page.get("next_cursor")
            if not cursor:
                return found

    async def _get(self, path: str, query: dict[str, str]) -> Any:
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(self.url, timeout=timeout) as http,
            http.get(path, params=query) as answer,
        ):
            if answer.status == 404:  # the project is created by the first span
                return {"data": []}
            answer.raise_for_status()
            return await answer.json()

    async def _answers(self) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http,
                http.get(f"{self.url}/healthz") as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


@asynccontextmanager
async def phoenix() -> AsyncIterator[Phoenix]:
    """Run a server. Raises ChildError if it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="dps-phoenix-", ignore_cleanup_errors=True) as folder:
        server = Phoenix(Path(folder))
        server.child.start()
        try:
            await server.child.wait_ready(START_SECONDS)
            yield server
        finally:
            await server.child.stop()
