"""A DPSRouter with real SGLang on the CPU in pods whose pools share a prefix cache in Mooncake.

The pods' image contains only Debian and Python. SGLang, a tiny model and the rest are mounted from this machine by
hostPath.
"""

import asyncio
import re
import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from dps_local.sglang import CPU_SPECULATION
from dps_local.stack import MODEL as SERVED_NAME
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.http import status_of
from dps_testkit.waiting import eventually
from e2e.node.conftest import A100
from e2e.node.containers import until_restarted
from e2e.node.sessions import alternating, turns
from e2e.prefix_cache import hicache, mooncake
from e2e.prefix_cache.alternation import THRESHOLD_TOKENS, check_answers, sessions
from e2e.prefix_cache.sessions import Session, play
from e2e.real_sglang.local_sglang import HERE, VENV, tiny_model

IMAGE = "localhost/python:bookworm"
GLIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libresolv.so.2", "librt.so.1"}
LOAD_SECONDS = 900.0
"""Time limit for loading two engines on a busy machine; an idle one with two cores needs 90 s."""
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
    "PYTHONPATH": f"/opt/shim:/opt/modules:{mooncake.PACKAGE}",
    "LD_LIBRARY_PATH": "/opt/libraries",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HOME": "/tmp",
}
# A busy machine may exceed the time limit of the operator's policy. The last value of a flag applies.
APPENDED = shlex.join(("--hicache-storage-prefetch-policy", "wait_complete"))
COMMAND = ["sh", "-c", f'exec python3 -m sglang.launch_server "$@" {APPENDED}', "sglang"]
QUESTIONS = dict(zip(("greedy", "speculative"), alternating(2), strict=True))
"""For each pool, a first question that is routed to it."""
PODS = f"dpsrouter.io/router={ROUTER}"


@dataclass(frozen=True)
class Fleet:
    """A DPSRouter that is ready, and the URLs of its gateway and of the engine of each pool.

    unmoved: sessions that were played on the greedy engine alone.
    """

    node: Cluster
    kube: Kube
    gateway: str
    engines: Mapping[str, str]
    unmoved: Sequence[Session]

    async def play_until(self, ended: asyncio.Event, salt: str) -> None:
        """Play sessions that change pools on every turn, again and again until the event is set.

        Fails if a request fails or an answer is wrong.
        """
        for attempt in count():
            if ended.is_set():
                return
            played = sessions(f"{salt} {attempt}")
            await play(played, self.gateway, {})
            check_answers(played, self.unmoved)

    def engine_pod(self, pool: str) -> Manifest:
        """The pod of a pool's only engine."""
        (pod,) = self.kube.list("pod", f"{PODS},dpsrouter.io/component={pool}")
        return pod

    def restarted(self, pod: Manifest, pool: str) -> None:
        """Wait until a killed engine serves again, through its Service too, and the gateway sends it requests."""
        until_restarted(self.kube, pod, LOAD_SECONDS)
        attempts = count(1)

        def routed() -> None:
            # Each attempt is a new session. A repeated prompt would have ΔL = 0, which would determine its pool.
            system = f"You are brief. This is attempt {next(attempts)}."
            (first,) = turns(self.gateway, SERVED_NAME, [QUESTIONS[pool]], system=system)
            assert first.pool == pool
            assert asyncio.run(status_of(f"{self.engines[pool]}/health")) == 200

        eventually(routed)


@asynccontextmanager
async def running(node: Cluster, kube: Kube, folder: Path) -> AsyncIterator[Fleet]:
    """Create the DPSRouter, and delete it on exit.

    folder: an empty one. Skips the test if the node cannot mount this machine's folders.
    """
    if node.state is None:
        pytest.skip("the nodes of this cluster cannot mount this machine's folders")
    hicache.install()
    _load_image(node, folder)
    mooncake.install()
    libraries = folder / "libraries"
    libraries.mkdir()
    _copy_libraries(mooncake.BINARIES, libraries)
    with ExitStack() as stack:
        kube.apply(_router(libraries))
        stack.callback(_delete, kube)
        kube.until(ROUTER, LOAD_SECONDS, Ready="True", PrefixCacheShared="BothWays")
        gateway = stack.enter_context(node.reach(kube, f"{ROUTER}-gateway", 8000))
        engines = {
            pool: stack.enter_context(node.reach(kube, f"{ROUTER}-{pool}", PORT)) for pool in QUESTIONS
        }
        unmoved = sessions("unmoved")
        await play(unmoved, engines["greedy"], {"": engines["greedy"]})
        yield Fleet(node, kube, gateway, engines, unmoved)


def _delete(kube: Kube) -> None:
    """Delete the DPSRouter, and wait until the memory of its pods is free. No request is left that they could drain."""
    kube.kubectl("delete", "dpsrouter", ROUTER)
    kube.kubectl(
        "delete", "pod", "--selector", PODS, "--grace-period=1", "--ignore-not-found", "--wait=false"
    )
    kube.kubectl("wait", "--for=delete", "pod", "--selector", PODS, "--timeout=100s")


def _router(libraries: Path) -> Manifest:
    template = _mounted("mooncake", **{VENV.name: VENV}, libraries=libraries)
    (master,) = template["spec"]["containers"]
    master["env"] = [
        {"name": "PATH", "value": f"{mooncake.PACKAGE}/mooncake:/usr/bin:/bin"},
        {"name": "LD_LIBRARY_PATH", "value": "/opt/libraries"},
    ]
    resources = {"requests": {"cpu": "50m", "memory": "256Mi"}}
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
            "prefixCache": {
                "mode": "Common",
                "mooncake": {
                    "segmentSize": "256Mi",
                    "master": {"resources": resources, "podTemplate": template},
                },
            },
            "pools": {
                "speculative": {
                    "speculation": {"algorithm": "Standalone", "draftModel": MODEL},
                    "args": list(CPU_SPECULATION),
                    **_pool(libraries),
                },
                "greedy": _pool(libraries),
            },
            "routing": {"thresholdTokens": THRESHOLD_TOKENS},
            "gateway": {
                "replicas": 1,
                "resources": {"requests": resources["requests"]},
                "podTemplate": _mounted("gateway", tiny=tiny_model()),
            },
        },
    }


def _pool(libraries: Path) -> Manifest:
    template = _mounted(
        "engine",
        **{VENV.name: VENV},
        shim=HERE / "shim",
        tiny=tiny_model(),
        modules=hicache.compiled_modules(),
        libraries=libraries,
    )
    (container,) = template["spec"]["containers"]
    container["command"] = COMMAND
    return {
        "podTemplate": template,
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": A100},
    }


def _load_image(node: Cluster, folder: Path) -> None:
    """Load the image into the node, with an archive in `folder`."""
    archive = folder / "python.tar"
    target = f"docker-archive:{archive}:{IMAGE}"
    subprocess.run(["buildah", "push", "--quiet", IMAGE, target], check=True, timeout=300)
    subprocess.run([*node.load, archive], check=True, timeout=300)


def _copy_libraries(users: Iterable[Path], folder: Path) -> None:
    """Copy the system's libraries that these programs and libraries load. The image has those of glibc."""
    for user in users:
        done = subprocess.run(["ldd", user], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        for name, path in re.findall(r"^\s*(\S+) => (/(?:usr/)?lib/\S+)", done.stdout, re.MULTILINE):
            if name not in GLIBC:
                shutil.copy(path, folder / name)


def _mounted(container: str, **folders: Path) -> Manifest:
    """A pod template that mounts folders of this machine at /opt/NAME."""
    mounts = [{"name": name, "mountPath": f"/opt/{name}"} for name in folders]
    volumes = [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()]
    return {"spec": {"containers": [{"name": container, "volumeMounts": mounts}], "volumes": volumes}}
