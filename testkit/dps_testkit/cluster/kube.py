"""A real API server for tests: kubectl, helm, an operator process, and namespaces of their own.

Nothing here touches a cluster that it did not start: the kubeconfig is its own, and its context is checked.
"""

import json
import os
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dps_testkit.errors import RefusedError
from dps_testkit.waiting import eventually

BIN = Path(os.environ.get("CLUSTER_BIN", Path.home() / ".cache/dps-router/cluster/bin"))
CONTEXT = "dps-test"
COMMAND_SECONDS = 120.0
"""No command takes so long, helm's waiting included; one that does is stuck, and its test should say so."""
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kube:
    """A cluster by its kubeconfig, and one namespace of it."""

    kubeconfig: Path
    namespace: str = "default"

    def run(self, *command: str, stdin: str = "") -> str:
        """What a command writes; RefusedError where it fails or hangs. They all see this cluster only."""
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        try:
            done = subprocess.run(
                command, input=stdin, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise RefusedError(f"{' '.join(command)}: not done after {COMMAND_SECONDS:.0f} s") from None
        if done.returncode:
            raise RefusedError(done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """kubectl in this namespace."""
        return self.run("kubectl", "--namespace", self.namespace, *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """helm in this namespace."""
        return self.run("helm", "--namespace", self.namespace, *arguments)

    def get(self, *what: str) -> Manifest:
        """One object, as it is."""
        found: Manifest = json.loads(self.kubectl("get", *what, "--output", "json"))
        return found

    def list(self, kinds: str, selector: str = "") -> list[Manifest]:
        """Objects of some kinds, by labels."""
        found = json.loads(self.kubectl("get", kinds, "--selector", selector, "--output", "json"))
        items: list[Manifest] = found["items"]
        return items

    def apply(self, *manifests: Manifest, dry_run: bool = False, server_side: bool = False) -> None:
        """kubectl apply, by which a later one removes what is left out. Only server-side it keeps nulls."""
        flags = ["--dry-run=server"] * dry_run + ["--server-side"] * server_side
        self.kubectl("apply", *flags, "--filename", "-", stdin=yaml.safe_dump_all(manifests))

    def patch(self, kind: str, name: str, change: Manifest, *more: str) -> None:
        """A merge patch."""
        self.kubectl("patch", kind, name, "--type", "merge", "--patch", json.dumps(change), *more)

    def condition(self, name: str, wanted: str = "Ready") -> Manifest:
        """A condition of a DPSRouter, for its newest generation; AssertionError before there is one."""
        router = self.get("dpsrouter", name)
        status = router.get("status", {})
        assert status.get("observedGeneration") == router["metadata"]["generation"], "not observed yet"
        found: list[Manifest] = [one for one in status["conditions"] if one["type"] == wanted]
        assert found, f"no condition {wanted}"
        return found[0]

    def until(self, name: str, seconds: float = 60, **conditions: str) -> None:
        """Wait until a DPSRouter's conditions have these statuses or reasons."""

        def look() -> None:
            for kind, wanted in conditions.items():
                seen = self.condition(name, kind)
                assert wanted in (seen["status"], seen["reason"]), f"{kind}: {seen}, not {wanted}"

        eventually(look, seconds)

    @contextmanager
    def scratch(self) -> Iterator["Kube"]:
        """A namespace that exists for a while."""
        name = f"t-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        try:
            yield Kube(self.kubeconfig, name)
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")


def volume(number: int, path: Path) -> Manifest:
    """A volume in a folder of the node, which a claim of the class `standard` can be bound to."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"volume-{number}"},
        "spec": {
            "capacity": {"storage": "100Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "storageClassName": "standard",
            "hostPath": {"path": str(path)},
        },
    }


def refuse_unknown(kube: Kube, known: str) -> None:
    """RefusedError unless the kubeconfig's context is the one that was named as a cluster for tests."""
    context = kube.run("kubectl", "config", "current-context").strip()
    if context != known:
        raise RefusedError(
            f"the current context is {context!r}; these tests install and delete things. "
            f"If it is a cluster for tests, say so: E2E_CONTEXT={shlex.quote(context)}"
        )
