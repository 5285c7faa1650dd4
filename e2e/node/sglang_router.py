"""A DPSRouter whose pods run real SGLang on the CPU, and whose pools share a prefix cache.

The pods' image contains only Debian and Python. SGLang, a tiny model and the rest are mounted from this machine by
hostPath.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dps_engines.launch import Algorithm
from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_local.sglang import CPU_SPECULATION
from dps_local.stack import MODEL as SERVED_NAME
from dps_testkit.cluster.kube import Manifest
from e2e.node.conftest import A100
from e2e.node.mounts import IMAGE, mounted
from e2e.prefix_cache.alternation import THRESHOLD_TOKENS
from e2e.prefix_cache.mooncake import PACKAGE
from e2e.real_sglang.local_sglang import HERE, VENV

ROUTER = "real"
PORT = 30000
MODEL = "/opt/tiny"
CPU = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-overlap-schedule", "--skip-server-warmup"),
    # Other processes may allocate more of the machine's memory than SGLang expects while the engine loads.
    *("--mem-fraction-static", "0.8", "--max-total-tokens", "20000", "--sleep-on-idle"),
]
ENV = {
    "PATH": f"{VENV}/bin:/usr/bin:/bin",
    "PYTHONPATH": f"/opt/shim:/opt/modules:/opt/halting:{PACKAGE}",
    "LD_LIBRARY_PATH": "/opt/libraries",
    "HALTING_REQUESTS": "/opt/requests",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HOME": "/tmp",
}

OTHER_GEOMETRY = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
"""Changes of the model's configuration that change the KV, but neither the weights nor the size of a page."""
WAIT_FOR_FETCHES = ("--hicache-storage-prefetch-policy", "wait_complete")
"""A busy machine may exceed the time limit of the operator's policy."""
APPENDING = 'exec python3 -m sglang.launch_server "$@" {}'
"""A command that appends flags to a container's arguments. The last value of a flag applies, and the operator sets
some of them itself."""


@dataclass(frozen=True)
class Pair:
    """A greedy engine and one that speculates with this algorithm.

    flags: appended to both command lines. backend: where the pages are.
    """

    algorithm: Algorithm
    page_tokens: int = PAGE_TOKENS
    flags: Sequence[str] = ()
    backend: Literal["File", "Mooncake"] = "File"

    def __str__(self) -> str:
        return f"{self.algorithm} {self.page_tokens} {self.backend}"


@dataclass(frozen=True)
class Folders:
    """Folders of this machine that the engines' pods mount.

    model: the model and draft model. modules: what SGLang would compile. libraries: those that Mooncake loads, if it is
    used. pages: the directory of the prefix cache. halting: an installation of `halting.py`. requests: for each pool,
    the folder with requests to halt.
    """

    model: Path
    modules: Path
    libraries: Path
    pages: Path
    halting: Path
    requests: Mapping[str, Path]


def router(folders: Folders, pair: Pair) -> Manifest:
    """The DPSRouter."""
    return {
        "apiVersion": "dpsrouter.io/v1alpha1",
        "kind": "DPSRouter",
        "metadata": {"name": ROUTER},
        "spec": {
            "model": {"name": MODEL, "servedName": SERVED_NAME},
            "engine": {
                "image": IMAGE,
                "version": "0.5.23",
                "args": CPU,
                "env": [{"name": name, "value": value} for name, value in ENV.items()],
            },
            "prefixCache": {"mode": "Common", "backend": pair.backend, **_storage(folders, pair)},
            "pools": {
                "speculative": {**_speculation(pair), **_pool("speculative", folders, pair)},
                "greedy": _pool("greedy", folders, pair),
            },
            "routing": {"thresholdTokens": THRESHOLD_TOKENS},
            "gateway": {
                "replicas": 1,
                "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
                "podTemplate": mounted("gateway", tiny=folders.model),
            },
        },
    }


def _storage(folders: Folders, pair: Pair) -> Manifest:
    if pair.backend == "File":
        return {"file": {"hostPath": str(folders.pages)}, "size": "128Mi"}
    template = mounted("mooncake", **{VENV.name: VENV}, libraries=folders.libraries)
    (container,) = template["spec"]["containers"]
    container["env"] = [
        {"name": "PATH", "value": f"{PACKAGE}/mooncake:/usr/bin:/bin"},
        {"name": "LD_LIBRARY_PATH", "value": "/opt/libraries"},
    ]
    resources = {"requests": {"cpu": "50m", "memory": "256Mi"}}
    return {"mooncake": {"segmentSize": "256Mi", "master": {"resources": resources, "podTemplate": template}}}


def _speculation(pair: Pair) -> Manifest:
    if pair.algorithm == "Ngram":
        # The default capacity needs 1.5 GB.
        return {
            "speculation": {"algorithm": "Ngram"},
            "args": [*CPU_SPECULATION, "--speculative-ngram-capacity", "100000"],
        }
    return {
        "speculation": {"algorithm": pair.algorithm, "draftModel": MODEL},
        "args": list(CPU_SPECULATION),
    }


def _pool(name: str, folders: Folders, pair: Pair) -> Manifest:
    template = mounted(
        "engine",
        **{VENV.name: VENV},
        shim=HERE / "shim",
        tiny=folders.model,
        modules=folders.modules,
        libraries=folders.libraries,
        halting=folders.halting,
        requests=folders.requests[name],
    )
    if pair.flags:
        (container,) = template["spec"]["containers"]
        container["command"] = ["sh", "-c", APPENDING.format(shlex.join(pair.flags)), "sglang"]
    return {
        "podTemplate": template,
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": A100},
    }


def by_hand(name: str, deployment: Manifest) -> Manifest:
    """A pod with an engine of another geometry, which is otherwise that of a pool's Deployment.

    It has none of the labels by which the operator and the gateway find engines.
    """
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    container["args"] += ["--json-model-override-args", json.dumps(OTHER_GEOMETRY)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"engine": name}},
        "spec": spec,
    }
