"""Benchmark one operator with many DPSRouters: python -m e2e.cluster.bench [COUNT].

Prints the time until all children exist and all DPSRouters are ready, the operator's memory and CPU time, API calls per
DPSRouter, the CPU time of the next full listing, which reconciles every DPSRouter, the peak memory including it, and
the API writes and CPU use of the idle operator in the minute after it.
"""

import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dps_operator.objects import CHILDREN
from dps_testkit.cluster.control_plane import control_plane
from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.operator import Operator, service_account_kubeconfig
from dps_testkit.paths import ROOT
from dps_testkit.waiting import eventually
from e2e.cluster.fixtures import ACCOUNT, PORT, RELEASE, SYSTEM
from e2e.cluster.routers import router

IDLE_SECONDS = 60
LIMIT_SECONDS = 1800
LISTING_SECONDS = 600
"""The operator's default interval of full listings."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
KINDS = len(CHILDREN)
"""More calls than the operator makes between listings, to check for kinds that are not installed."""
BATCH = 100
"""DPSRouters that one call of kubectl creates, which has a time limit."""


def calls(operator: Operator) -> Counter[str]:
    """API server calls so far, by verb."""
    found: Counter[str] = Counter()
    for line in operator.get("/metrics").splitlines():
        if line.startswith("dps_operator_api_requests_total{"):
            verb = re.search(r'verb="(\w+)"', line)
            found[verb.group(1) if verb else ""] += int(float(line.rsplit(" ", 1)[1]))
    return found


@dataclass(frozen=True)
class Usage:
    """Resident memory in MiB, now and at most so far, and CPU time in seconds of the operator process."""

    memory: float
    peak_memory: float
    cpu: float

    @classmethod
    def of(cls, operator: Operator) -> "Usage":
        """What the process uses now."""
        status = Path(f"/proc/{operator.pid}/status").read_text()
        kilobytes = {name: int(size) for name, size in re.findall(r"(Vm\w+):\s+(\d+) kB", status)}
        fields = Path(f"/proc/{operator.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])
        return cls(kilobytes["VmRSS"] / 1024, kilobytes["VmHWM"] / 1024, ticks / TICKS_PER_SECOND)


def count(kube: Kube, path: str, expected: str) -> int:
    """The number of DPSRouters whose value at a JSONPath starts with `expected`."""
    text = kube.kubectl("get", "dpsrouter", "-o", f'jsonpath={{range .items[*]}}{path}{{"\\n"}}{{end}}')
    return sum(line.startswith(expected) for line in text.splitlines())


def run(kube: Kube, scratch: Path, routers: int) -> None:
    """Run the benchmark on a cluster with the chart installed."""
    kubeconfig = service_account_kubeconfig(Kube(kube.kubeconfig, SYSTEM), ACCOUNT, scratch / "operator")
    store = {"urlSecretRef": {"name": "redis", "key": "url"}}
    names = [f"r{number:03}" for number in range(routers)]
    for first in range(0, routers, BATCH):
        batch = names[first : first + BATCH]
        kube.apply(*(router(name, sessionStore=store, gateway={"replicas": 1}) for name in batch))
    operator = Operator(kubeconfig, scratch / "log")
    try:
        _measure(operator, kube, routers)
    finally:
        operator.stop()


def _measure(operator: Operator, kube: Kube, routers: int) -> None:
    """Print the measurements of an operator that has just been started."""
    began = time.monotonic()

    def reached(path: str, expected: str) -> float:
        def check() -> None:
            assert count(kube, path, expected) == routers

        eventually(check, LIMIT_SECONDS)
        return time.monotonic() - began

    ready = '{.status.conditions[?(@.type=="Ready")].status}'
    settled = '{.status.conditions[?(@.type=="Progressing")].reason}'
    print(f"{routers} DPSRouters, seconds since the operator's start")
    print(f"  all have their children      {reached('{.status.observedGeneration}', '1'):8.1f}")
    print(f"  all are ready                {reached(ready, 'True'):8.1f}")
    reached(settled, "Settled")
    eventually(lambda: _idle(operator), 120)
    before, settled_usage = calls(operator), Usage.of(operator)
    print(f"  operator memory, MiB         {settled_usage.memory:8.0f}")
    print(f"  operator CPU time, s         {settled_usage.cpu:8.1f}")
    for verb, number in sorted(before.items()):
        print(f"  {verb:<6} calls per DPSRouter    {number / routers:8.1f}")
    eventually(lambda: _listing(operator, before), LISTING_SECONDS + 60)
    eventually(lambda: _idle(operator), 120)
    listed = Usage.of(operator)
    print(f"  CPU time of a listing, s     {listed.cpu - settled_usage.cpu:8.1f}")
    print(f"  peak memory so far, MiB      {listed.peak_memory:8.0f}")
    time.sleep(IDLE_SECONDS)
    written = sum(number for verb, number in (calls(operator) - before).items() if verb != "GET")
    print(f"  writes when settled          {written:8}")
    idle = Usage.of(operator).cpu - listed.cpu
    print(f"  CPU when idle, percent       {idle / IDLE_SECONDS * 100:8.1f}")


def _idle(operator: Operator) -> None:
    before = calls(operator)
    time.sleep(3)
    assert calls(operator) == before


def _listing(operator: Operator, before: Counter[str]) -> None:
    """Assert that the operator lists all objects, after the calls in `before`."""
    assert calls(operator)["GET"] > before["GET"] + KINDS


def main() -> None:
    """Run the benchmark on a temporary control plane."""
    routers = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with (
        tempfile.TemporaryDirectory() as folder,
        control_plane(Path(folder) / "cluster", PORT) as bare_cluster,
    ):
        chart = str(ROOT / "charts/dps-router")
        Kube(bare_cluster.kubeconfig, SYSTEM).helm("install", RELEASE, chart, "--create-namespace", "--wait")
        with bare_cluster.scratch() as kube:
            run(kube, Path(folder), routers)


if __name__ == "__main__":
    main()
