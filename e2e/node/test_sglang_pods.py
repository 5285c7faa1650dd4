"""Real SGLang in pods on the CPU, started with the operator's command line.

The image contains only Debian and Python; SGLang and a tiny model are mounted from this machine by hostPath.
"""

import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.paths import ROOT
from e2e.node.conftest import A100
from e2e.node.sessions import Turn, alternating, turns
from e2e.real_sglang.local_sglang import HERE, VENV, install, tiny_model

pytestmark = pytest.mark.timeout(2400)

IMAGE = "localhost/python:bookworm"
LOAD_SECONDS = 900.0
"""Time limit for loading two engines on a busy machine; an idle one with two cores needs 90 s."""
MODEL = "/opt/tiny"
CPU = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-overlap-schedule", "--skip-server-warmup"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "20000", "--sleep-on-idle"),
]
ENV = {
    "PATH": f"{VENV}/bin:/usr/bin:/bin",
    "PYTHONPATH": "/opt/shim",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HOME": "/tmp",
}


def mounted(container: str, **folders: Path) -> Manifest:
    """A pod template that mounts folders of this machine at /opt/NAME."""
    return {
        "spec": {
            "containers": [
                {
                    "name": container,
                    "volumeMounts": [
                        {"name": name, "mountPath": f"/opt/{name}", "readOnly": True} for name in folders
                    ],
                }
            ],
            "volumes": [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()],
        }
    }


def sglang(model: Path) -> Manifest:
    """A DPSRouter with real SGLang engines."""
    engine = mounted(
        "engine",
        **{VENV.name: VENV, "shim": HERE / "shim", Path(MODEL).name: model},
    )
    pool = {
        "podTemplate": engine,
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": A100},
    }
    small = {"requests": {"cpu": "50m", "memory": "256Mi"}}
    return {
        "apiVersion": "dpsrouter.io/v1alpha1",
        "kind": "DPSRouter",
        "metadata": {"name": "real"},
        "spec": {
            "model": {"name": MODEL, "servedName": "tiny"},
            "engine": {
                "image": IMAGE,
                "version": "0.5.23",
                "args": CPU,
                "env": [{"name": name, "value": value} for name, value in ENV.items()],
            },
            "pools": {
                "speculative": {
                    "speculation": {"algorithm": "Standalone", "draftModel": MODEL},
                    # On a CPU without AMX, SGLang replaces intel_amx in --attention-backend, but not in these two
                    # flags, which therefore select the attention operators of e2e/real_sglang/shim.
                    "args": [
                        *("--prefill-attention-backend", "intel_amx"),
                        *("--decode-attention-backend", "intel_amx"),
                    ],
                    **pool,
                },
                "greedy": pool,
            },
            "gateway": {
                "replicas": 1,
                "resources": small,
                "podTemplate": mounted("gateway", **{Path(MODEL).name: model}),
            },
        },
    }


@pytest.fixture(scope="module")
def session(node: Cluster, kube: Kube) -> Iterator[list[Turn]]:
    """The turns of a session that uses both pools."""
    if node.state is None:
        pytest.skip("the nodes of this cluster cannot mount this machine's folders")
    install()
    archive = node.state / "python.tar"
    subprocess.run(
        ["buildah", "push", "--quiet", IMAGE, f"docker-archive:{archive}:{IMAGE}"], check=True, timeout=300
    )
    subprocess.run([ROOT / "e2e/cluster/load-image", node.state, archive], check=True, timeout=300)
    kube.apply(sglang(tiny_model()))
    kube.until("real", LOAD_SECONDS, Ready="True")
    with node.reach(kube, "real-gateway", 8000) as url:
        yield list(turns(url, "tiny", alternating(6)))
    kube.kubectl("delete", "dpsrouter", "real")


def test_turns_are_routed_to_engines_started_by_the_operator(session: list[Turn]) -> None:
    assert [(turn.number, turn.pool) for turn in session] == [
        (number, "speculative" if number % 2 == 0 else "greedy") for number in range(1, 7)
    ]


def test_prompt_lengths_match_the_engines_count(session: list[Turn]) -> None:
    lengths = [turn.prompt_tokens for turn in session]
    assert [turn.engine_prompt_tokens for turn in session] == lengths
    assert [turn.delta_tokens for turn in session] == [
        lengths[0],
        *(after - before for before, after in pairwise(lengths)),
    ]


def test_each_engine_has_cached_the_turns_it_served(session: list[Turn]) -> None:
    assert [turn.cached_tokens for turn in session[:2]] == [0, 0]
    for before, after in zip(session, session[2:], strict=False):
        assert before.pool == after.pool
        assert before.prompt_tokens <= after.cached_tokens < after.prompt_tokens
