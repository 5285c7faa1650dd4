"""A DPSRouter whose pods run real SGLang on the CPU, and whose pools share a prefix cache.

The pods' image contains only Debian and Python. SGLang, a tiny model and the rest are mounted from this machine by
hostPath.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from dps_local.stack import MODEL as SERVED_NAME
from dps_testkit.cluster.kube import Manifest
from e2e.node.conftest import A100
from e2e.node.mounts import IMAGE, mounted
from e2e.prefix_cache.alternation import THRESHOLD_TOKENS
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
    "PYTHONPATH": "/opt/shim:/opt/hash:/opt/halting",
    "HALTING_REQUESTS": "/opt/requests",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HOME": "/tmp",
}

OTHER_GEOMETRY = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
"""Changes of the model's configuration that change the KV, but neither the weights nor the size of a page."""


def router(model: Path, pages: Path, halting: Path, hashes: Path, requests: Mapping[str, Path]) -> Manifest:
    """The DPSRouter.

    pages: the directory of the prefix cache. halting: an installation of `halting.py`. hashes: SGLang's compiled hash
    function. requests: for each pool, the folder with requests to halt.
    """
    shared = {
        VENV.name: VENV,
        "shim": HERE / "shim",
        "tiny": model,
        "halting": halting,
        "hash": hashes,
    }

    def pool(name: str) -> Manifest:
        return {
            "podTemplate": mounted("engine", **shared, requests=requests[name]),
            "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": A100},
        }

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
            "prefixCache": {"mode": "Common", "file": {"hostPath": str(pages)}, "size": "128Mi"},
            "pools": {
                "speculative": {
                    "speculation": {"algorithm": "Standalone", "draftModel": MODEL},
                    # On a CPU without AMX, SGLang replaces intel_amx in --attention-backend, but not in these two
                    # flags, which therefore select the attention operators of e2e/real_sglang/shim.
                    "args": [
                        *("--prefill-attention-backend", "intel_amx"),
                        *("--decode-attention-backend", "intel_amx"),
                    ],
                    **pool("speculative"),
                },
                "greedy": pool("greedy"),
            },
            "routing": {"thresholdTokens": THRESHOLD_TOKENS},
            "gateway": {
                "replicas": 1,
                "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
                "podTemplate": mounted("gateway", tiny=model),
            },
        },
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
