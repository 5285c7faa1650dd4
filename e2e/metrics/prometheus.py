"""Prometheus: its binaries, and a server that scrapes fixed targets every second."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml

from dps_local.processes import Child, free_ports

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RULES = ROOT / "charts/dps-router/files/rules.yaml"
SECONDS = 60.0
"""Time limit for a query or a run of promtool."""


def binary(name: str) -> Path:
    """The path of `prometheus` or `promtool`, which is installed if necessary."""
    done = subprocess.run([HERE / "install"], check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return Path(done.stdout.strip()) / name


@dataclass(frozen=True)
class Target:
    """A scrape target, with the labels that a ServiceMonitor would attach."""

    url: str
    labels: Mapping[str, str]


class Prometheus:
    """An async context manager that runs a server with the chart's alert rules, evaluated every second."""

    def __init__(self, folder: Path, targets: Sequence[Target]) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        configuration = folder / "prometheus.yaml"
        static = [
            {"targets": [item.url.removeprefix("http://")], "labels": dict(item.labels)} for item in targets
        ]
        configuration.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(RULES)],
                    "scrape_configs": [{"job_name": "dps", "static_configs": static}],
                }
            )
        )
        command = [str(binary("prometheus")), f"--config.file={configuration}"]
        command += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
        self._child = Child("prometheus", command, folder / "prometheus.log", self._ready)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=SECONDS))
        self._child.start()
        try:
            await self._child.wait_ready(SECONDS)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        await self._http.close()
        await self._child.stop()

    async def query(self, expression: str) -> list[dict[str, str]]:
        """The labels of all current series of an expression, except NaN. Raises ValueError if it is invalid."""
        data = await self._get("/api/v1/query", query=expression)
        if data["resultType"] != "vector":
            raise ValueError(f"{expression}: a {data['resultType']}, not a vector")
        return [series["metric"] for series in data["result"] if series["value"][1] != "NaN"]

    async def values(self, label: str, match: str = "") -> set[str]:
        """The values of a label in all series, or in those that match a selector."""
        found = await self._get(f"/api/v1/label/{label}/values", **({"match[]": match} if match else {}))
        return set(found)

    async def alerts(self) -> list[dict[str, str]]:
        """The labels of all pending and firing alerts."""
        return [item["labels"] for item in (await self._get("/api/v1/alerts"))["alerts"]]

    async def rules(self) -> dict[str, str]:
        """The health of each rule by alert name: `ok` or the evaluation error."""
        groups = (await self._get("/api/v1/rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: rule.get("lastError") or rule["health"] for rule in rules}

    async def _ready(self) -> bool:
        assert self._http is not None
        try:
            async with self._http.get("/-/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def _get(self, path: str, **parameters: str) -> Any:
        assert self._http is not None
        async with self._http.get(path, params=parameters) as answer:
            document = await answer.json()
        if document["status"] != "success":
            raise ValueError(f"{parameters}: {document['error']}")
        return document["data"]
