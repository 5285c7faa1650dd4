"""kubectl and helm on a test cluster, and temporary namespaces.

Every command uses an explicit kubeconfig. `refuse_unknown` guards against clusters that are not meant for tests.
"""

import base64
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
from dps_testkit.waiting import PATIENCE_SECONDS, eventually

BIN = Path(os.environ.get("CLUSTER_BIN", Path.home() / ".cache/dps-router/cluster/bin"))
CONTEXT = "dps-test"
COMMAND_SECONDS = 120.0
"""Time limit for every command, including helm's `--wait`. A command that takes longer is stuck."""
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kube:
    """One namespace of a cluster."""

    kubeconfig: Path
    namespace: str = "default"

    def run(self, *command: str, stdin: str = "") -> str:
        """Run a command against this cluster and return its output. Raises RefusedError if it fails or hangs."""
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
        """Run kubectl in this namespace."""
        return self.run("kubectl", "--namespace", self.namespace, *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """Run helm in this namespace."""
        return self.run("helm", "--namespace", self.namespace, *arguments)

    def get(self, *what: str) -> Manifest:
        """Get one object."""
        found: Manifest = json.loads(self.kubectl("get", *what, "--output", "json"))
        return found

    def list(self, kinds: str, selector: str = "", *, all_namespaces: bool = False) -> list[Manifest]:
        """List objects of the given kinds, by label selector."""
        flags = ["--all-namespaces"] * all_namespaces
        found = json.loads(self.kubectl("get", kinds, "--selector", selector, *flags, "--output", "json"))
        items: list[Manifest] = found["items"]
        return items

    def apply(self, *manifests: Manifest, dry_run: bool = False, server_side: bool = False) -> None:
        """kubectl apply: fields missing from a later call are removed. Nulls are kept only if server_side is set."""
        flags = ["--dry-run=server"] * dry_run + ["--server-side"] * server_side
        self.kubectl("apply", *flags, "--filename", "-", stdin=yaml.safe_dump_all(manifests))

    def patch(self, kind: str, name: str, change: Manifest, *more: str) -> None:
        """Apply a merge patch."""
        self.kubectl("patch", kind, name, "--type", "merge", "--patch", json.dumps(change), *more)

    def condition(self, name: str, wanted: str = "Ready") -> Manifest:
        """A condition of a DPSRouter. Raises AssertionError if it is missing or of an older generation."""
        found = self._conditions(name)
        assert wanted in found, f"no condition {wanted}"
        return found[wanted]

    def until(self, name: str, seconds: float = PATIENCE_SECONDS, **conditions: str) -> None:
        """Wait until each of a DPSRouter's conditions has the given status or reason."""

        def check() -> None:
            found = self._conditions(name)
            for kind, wanted in conditions.items():
                assert kind in found, f"no condition {kind}"
                condition = found[kind]
                assert wanted in (condition["status"], condition["reason"]), (
                    f"{kind}: {condition}, not {wanted}"
                )

        eventually(check, seconds)

    def _conditions(self, name: str) -> dict[str, Manifest]:
        """The conditions of a DPSRouter, by type. Raises AssertionError if they are of an older generation."""
        router = self.get("dpsrouter", name)
        status = router.get("status", {})
        assert status.get("observedGeneration") == router["metadata"]["generation"], (
            "the newest generation is not observed yet"
        )
        return {condition["type"]: condition for condition in status["conditions"]}

    @contextmanager
    def scratch(self) -> Iterator["Kube"]:
        """A temporary namespace."""
        name = f"t-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        try:
            yield Kube(self.kubeconfig, name)
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")


def volume(number: int, path: Path) -> Manifest:
    """A PersistentVolume in a folder of the node, for claims of the storage class `standard`."""
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
    """Raise RefusedError unless the current context is `known`, the one named as a test cluster."""
    context = kube.run("kubectl", "config", "current-context").strip()
    if context != known:
        raise RefusedError(
            f"the current context is {context!r}; these tests install and delete things. "
            f"If it is a test cluster, set E2E_CONTEXT={shlex.quote(context)}"
        )


def decoded(secret: Manifest) -> dict[str, str]:
    """The plain values of a Secret from the API server."""
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
