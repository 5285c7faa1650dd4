"""Faults on a real node under continuous load: what clients of the gateway's Service observe of each.

All cases share one DPSRouter with emulated engines and one load generator; each case restores the initial state.
Clients may observe only error events, if an engine crashes during a stream, broken connections, if a gateway is
killed, and 503, if all engines are stopped.

This must be the last module on a node: after its last case the controller manager collects no garbage for minutes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import pytest
import pytest_asyncio

from dps_gateway.session.redis import PAUSE_SECONDS
from dps_lab.replay.records import Verdict
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.paths import ROOT
from dps_testkit.traffic import LoadOptions, Row, Traffic, traffic
from dps_testkit.waiting import eventually
from e2e.node import containers
from e2e.node.conftest import READY_SECONDS, RELEASE, emulated

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

ROUTER = "emulated"
OWNED = f"dpsrouter.io/router={ROUTER}"
UNDISTURBED_TURNS = 200
OUTAGE_SECONDS = 60.0
LONGEST_CHANGE_SECONDS = 30.0
"""Time limit for a new τ to take effect.

Without the operator's annotation the kubelet would sync the ConfigMap only every minute.
"""
HELD_SECONDS = 5.0
"""How long a rollout stays stuck, and engines stay stopped, under load."""
REDIS_TIMEOUT_SECONDS = 2.0
ATTEMPTS = 90
"""The pauses between them add up to 171 s, more than a suspended router needs to stop and to start again."""
FORCE = ("--force", "--grace-period=0")


@dataclass(frozen=True)
class Stage:
    """The DPSRouter under test, and the namespace of the operator's release."""

    node: Cluster
    system: Kube
    kube: Kube

    def pods(self, component: str = "") -> dict[str, Manifest]:
        """The router's pods by UID, including terminating ones."""
        labels = f"{OWNED},dpsrouter.io/component={component}" if component else OWNED
        return {pod["metadata"]["uid"]: pod for pod in self.kube.list("pod", labels)}

    def delete(self, component: str, *flags: str, count: int | None = None) -> None:
        """Delete `count` pods of a component, or all, and wait until replacements serve."""
        before = self.pods(component)
        deleted = dict(list(before.items())[:count])
        names = [pod["metadata"]["name"] for pod in deleted.values()]
        self.kube.kubectl("delete", "pod", *names, "--wait=false", *flags)

        def replaced() -> None:
            after = self.pods(component)
            assert len(after) == len(before)
            assert not deleted.keys() & after.keys()

        eventually(replaced, READY_SECONDS)
        self.settled()

    def crash(self, component: str) -> None:
        """Kill a container's process with requests in flight, and wait until it has restarted."""
        pod = next(iter(self.pods(component).values()))
        containers.kill(self.node, pod)
        containers.until_restarted(self.kube, pod)
        self.settled()

    def change(self, spec: Manifest) -> None:
        """Change the DPSRouter's spec and wait until the rollout is complete."""
        self.kube.patch("dpsrouter", ROUTER, {"spec": spec})
        self.settled()

    def stuck(self, words: str) -> None:
        """Wait until the status names what delays the rollout, and keep that state for a while."""

        def reported() -> None:
            assert words in self.kube.condition(ROUTER, "Progressing")["message"]
            assert self.kube.condition(ROUTER)["status"] == "True"

        eventually(reported, READY_SECONDS)
        time.sleep(HELD_SECONDS)

    def free_gpus(self) -> int:
        """GPUs of all nodes that no pod of any namespace requests."""
        nodes, pods = self.kube.list("node"), self.kube.list("pod", all_namespaces=True)
        running = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        limits = [
            container.get("resources", {}).get("limits", {})
            for pod in running
            for container in pod["spec"]["containers"]
        ]
        offered = sum(int(node["status"]["allocatable"]["nvidia.com/gpu"]) for node in nodes)
        return offered - sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)

    @contextmanager
    def full_node(self) -> Iterator[None]:
        """Another pod occupies all free GPUs until the block exits."""
        limits = {"nvidia.com/gpu": self.free_gpus()}
        container = {
            "name": "pause",
            "image": "localhost/pause:dps",
            "imagePullPolicy": "Never",
            "resources": {"limits": limits},
        }
        spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
        self.kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}, "spec": spec})
        self.kube.kubectl("wait", "pod/other", "--for=condition=Ready", "--timeout=60s")
        try:
            yield
        finally:
            self.kube.kubectl("delete", "pod", "other")

    def settled(self) -> None:
        """Wait until the DPSRouter is ready and settled and no pod is terminating."""
        self.kube.until(ROUTER, READY_SECONDS, Ready="True", Progressing="Settled")

        def all_ready() -> None:
            for pod in self.pods().values():
                assert "deletionTimestamp" not in pod["metadata"]
                ready = {item["type"]: item["status"] for item in pod["status"]["conditions"]}["Ready"]
                assert ready == "True", pod["metadata"]["name"]

        eventually(all_ready, READY_SECONDS)


@pytest.fixture(scope="module")
def stage(node: Cluster, system: Kube, kube: Kube) -> Iterator[Stage]:
    """A ready DPSRouter on a self-built cluster, whose processes can be stopped."""
    if node.state is None:
        pytest.skip("faults need a self-built cluster")
    router = emulated(ROUTER)
    # A busy machine may stop Redis for longer than the default, and a session that then changes gateways begins again.
    router["spec"]["sessionStore"]["timeoutSeconds"] = REDIS_TIMEOUT_SECONDS
    kube.apply(router)
    stage = Stage(node, system, kube)
    stage.settled()
    yield stage
    kube.kubectl("delete", "dpsrouter", ROUTER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def flow(stage: Stage) -> AsyncIterator[Traffic]:
    """The load for all cases, after an undisturbed baseline."""
    with stage.node.reach(stage.kube, f"{ROUTER}-gateway", 8000) as url:
        async with traffic(LoadOptions(f"{url}/v1", ROUTER, attempts=ATTEMPTS)) as running:
            await running.observe(UNDISTURBED_TURNS)
            baseline = await running.checkpoint("undisturbed")
            check(baseline)
            yield running


Fault = Callable[[Stage], None]


@dataclass(frozen=True)
class Case:
    """A fault, and the errors that clients may observe besides higher latency."""

    name: str
    inject: Fault
    retries: bool = False
    events: bool = False
    stopped: bool = False
    """Whether requests are refused with 503 for a while, because all engines are stopped, and with no other error."""
    outage: bool = False
    """Whether Redis is unavailable, so that a session which changes gateways meanwhile begins again."""

    def __str__(self) -> str:
        return self.name


def roll_gateways(stage: Stage) -> None:
    deployment = f"deployment/{ROUTER}-gateway"
    stage.kube.kubectl("rollout", "restart", deployment)
    stage.kube.kubectl("rollout", "status", deployment, "--timeout", "110s")
    stage.settled()


def scale_gateways(stage: Stage) -> None:
    for replicas in (1, 5, 2):
        stage.change({"gateway": {"replicas": replicas}})


def kill_operator(stage: Stage) -> None:
    """Kill the operator during a reconciliation; its successor completes it."""
    stage.kube.patch("dpsrouter", ROUTER, {"spec": {"gateway": {"replicas": 3}}})
    stage.system.kubectl("delete", "pod", "--all", "--wait=false", *FORCE)
    stage.settled()
    stage.change({"gateway": {"replicas": 2}})


def lose_redis(stage: Stage) -> None:
    """Delete the Redis pod; its volume and the sessions must survive."""

    def sessions() -> int:
        return int(stage.kube.kubectl("exec", f"{ROUTER}-redis-0", "--", "redis-cli", "dbsize"))

    before = sessions()
    stage.delete("redis")
    assert sessions() >= before > 0


def roll_engines(stage: Stage) -> None:
    stage.change({"engine": {"env": [{"name": "ROLLED", "value": "yes"}]}})


def scale_engines(stage: Stage) -> None:
    for replicas in (3, 1):
        stage.change({"pools": {"greedy": {"replicas": replicas}}})


def roll_out_bad_image(stage: Stage) -> None:
    image = stage.kube.get("dpsrouter", ROUTER)["spec"]["engine"]["image"]
    stage.kube.patch("dpsrouter", ROUTER, {"spec": {"engine": {"image": "localhost/absent:1"}}})
    stage.stuck("cannot pull localhost/absent:1")
    stage.change({"engine": {"image": image}})


def roll_out_crash_loop(stage: Stage) -> None:
    """The new template of one pool has a command that fails."""
    template = {"spec": {"containers": [{"name": "engine", "command": ["false"]}]}}
    stage.kube.patch("dpsrouter", ROUTER, {"spec": {"pools": {"greedy": {"podTemplate": template}}}})
    stage.stuck("ended with exit code 1")
    stage.change({"pools": {"greedy": {"podTemplate": None}}})


def roll_engines_without_a_gpu(stage: Stage) -> None:
    """The rollout waits for a spare GPU, and is completed when there is one."""
    with stage.full_node():
        stage.kube.patch(
            "dpsrouter", ROUTER, {"spec": {"engine": {"env": [{"name": "ROLLED", "value": "1"}]}}}
        )
        stage.stuck("Insufficient nvidia.com/gpu")
    stage.settled()


def recreate_engines_on_a_full_node(stage: Stage) -> None:
    """With strategy Recreate, both pools are rolled out although no GPU is free."""
    recreate = {"strategy": {"type": "Recreate"}}
    stage.change({"pools": {"speculative": recreate, "greedy": recreate}})
    before = stage.pods("speculative").keys() | stage.pods("greedy").keys()
    with stage.full_node():
        stage.change({"engine": {"env": [{"name": "ROLLED", "value": "2"}]}})
        assert before.isdisjoint(stage.pods("speculative").keys() | stage.pods("greedy").keys())
        assert stage.free_gpus() == 0
    stage.change({"pools": {"speculative": {"strategy": None}, "greedy": {"strategy": None}}})


def suspend_and_resume(stage: Stage) -> None:
    """Stop all engines, and start them again when none is left."""
    stage.kube.patch("dpsrouter", ROUTER, {"spec": {"suspend": True}})
    stage.kube.until(ROUTER, READY_SECONDS, Ready="Suspended")

    def stopped() -> None:
        assert not stage.pods("speculative")
        assert not stage.pods("greedy")

    eventually(stopped, READY_SECONDS)
    time.sleep(HELD_SECONDS)
    stage.change({"suspend": False})


def upgrade_and_roll_back(stage: Stage) -> None:
    """Upgrade to a release with another gateway image and roll back; the operator and the gateways restart twice."""
    image = "dps-router/gateway"
    tags = (f"docker.io/{image}:{tag}" for tag in ("0.1.0", "next"))
    containers.containerd(stage.node, "images", "tag", "--force", *tags)

    def runs(tag: str) -> None:
        images = {pod["spec"]["containers"][0]["image"] for pod in stage.pods("gateway").values()}
        assert images == {f"{image}:{tag}"}

    wait = ("--wait", "--timeout", "110s")
    values = ("--reuse-values", "--set", "gatewayImage.tag=next")
    stage.system.helm("upgrade", RELEASE, str(ROOT / "charts/dps-router"), *values, *wait)
    eventually(partial(runs, "next"), READY_SECONDS)
    stage.settled()
    stage.system.helm("rollback", RELEASE, *wait)
    eventually(partial(runs, "0.1.0"), READY_SECONDS)
    stage.settled()


def lose_api_server(stage: Stage) -> None:
    """Stop the API server for a minute, then wait until the node's lease is renewed and all pods are ready."""
    with stage.node.without_api_server():
        time.sleep(OUTAGE_SECONDS)
    back = datetime.now(UTC)
    leases = Kube(stage.kube.kubeconfig, "kube-node-lease")

    def lease_renewed() -> None:
        renewed = [datetime.fromisoformat(lease["spec"]["renewTime"]) for lease in leases.list("lease")]
        assert renewed
        assert min(renewed) > back

    eventually(lease_renewed, READY_SECONDS)
    stage.settled()


CASES = [
    Case("a gateway deleted", lambda stage: stage.delete("gateway", count=1)),
    Case("a gateway deleted by force", lambda stage: stage.delete("gateway", *FORCE, count=1), retries=True),
    Case("a gateway crashed", lambda stage: stage.crash("gateway"), retries=True),
    Case("gateways rolled out", roll_gateways),
    Case("gateways scaled 2 → 1 → 5 → 2", scale_gateways),
    Case("the operator deleted by force", kill_operator),
    Case("Redis deleted", lose_redis, outage=True),
    Case("Redis crashed", lambda stage: stage.crash("redis"), outage=True),
    Case("a pool's only engine deleted", lambda stage: stage.delete("speculative")),
    Case(
        "a pool's only engine deleted by force",
        lambda stage: stage.delete("greedy", *FORCE),
        retries=True,
        events=True,
    ),
    Case("a pool's only engine crashed", lambda stage: stage.crash("greedy"), retries=True, events=True),
    Case("engines rolled out", roll_engines),
    Case("engines scaled 1 → 3 → 1", scale_engines),
    Case("engines rolled out with an image that does not exist", roll_out_bad_image),
    Case("engines rolled out that crash at the start", roll_out_crash_loop),
    Case("engines rolled out without a free GPU", roll_engines_without_a_gpu),
    Case("engines recreated on a full node", recreate_engines_on_a_full_node),
    Case("suspended and resumed", suspend_and_resume, stopped=True),
    Case("the chart upgraded and rolled back", upgrade_and_roll_back),
    # After the outage the node's lease has expired, so every pod is removed from its Services until it is renewed.
    Case("the API server down for a minute", lose_api_server, retries=True),
]


def check(
    row: Row, *, retries: bool = False, events: bool = False, stopped: bool = False, outage: bool = False
) -> None:
    """Assert that no request failed, no session state was lost, and only allowed errors occurred."""
    print(row)
    assert row.failures == 0, row.troubles
    assert outage or row.forgotten == 0, row.troubles
    if stopped:
        assert row.troubles
        assert [trouble for trouble in row.troubles if not trouble.startswith("status 503: ")] == []
    else:
        assert retries or row.retries == 0, row.troubles
    assert events or row.events == 0, row.troubles


async def in_force(flow: Traffic, change: Callable[[], None], new: Callable[[Verdict], bool]) -> float:
    """Seconds from a change of the DPSRouter until the last turn that was decided by the old setting."""
    changed, before = time.monotonic(), len(flow.turns)
    await asyncio.to_thread(change)
    while True:
        await flow.observe(3 * flow.options.agents)
        old = [turn for turn in flow.turns[before:] if turn.verdict is not None and not new(turn.verdict)]
        newest = flow.turns[-3 * flow.options.agents :]
        if not any(turn in old for turn in newest):
            return max([0.0, *(turn.began - changed for turn in old)])


async def test_routing_change_takes_effect_within_seconds_without_restarts(
    stage: Stage, flow: Traffic
) -> None:
    before = await asyncio.to_thread(restart_counts, stage)
    routing = (await asyncio.to_thread(stage.kube.get, "dpsrouter", ROUTER))["spec"].get("routing", {})
    changes: dict[str, tuple[Manifest, Callable[[Verdict], bool]]] = {
        "τ = 0": ({"thresholdTokens": 0}, lambda verdict: verdict.reason == "over_threshold"),
        "τ = 4096": ({"thresholdTokens": 4096}, lambda verdict: verdict.reason == "within_threshold"),
        "policy AlwaysGreedy": ({"policy": "AlwaysGreedy"}, lambda verdict: verdict.reason == "fixed"),
    }
    for name, (change, new) in changes.items():
        patch = {"spec": {"routing": change}}
        seconds = await in_force(flow, partial(stage.kube.patch, "dpsrouter", ROUTER, patch), new)
        print(f"{name}: in force {seconds:.1f} s after `kubectl patch`")
        assert seconds < LONGEST_CHANGE_SECONDS
    restored = {"policy": None, "thresholdTokens": None} | routing
    await asyncio.to_thread(stage.change, {"routing": restored})
    row = await flow.checkpoint("τ and policy changed")
    check(row)
    assert await asyncio.to_thread(restart_counts, stage) == before


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_clients_observe_only_allowed_errors(case: Case, stage: Stage, flow: Traffic) -> None:
    await asyncio.to_thread(case.inject, stage)
    if case.outage:
        # Only after a pause do gateways try Redis again, and write the entries of the outage.
        await asyncio.sleep(2 * PAUSE_SECONDS)
    row = await flow.checkpoint(case.name)
    check(row, retries=case.retries, events=case.events, stopped=case.stopped, outage=case.outage)


def restart_counts(stage: Stage) -> set[tuple[str, int]]:
    """The UIDs of the router's pods, with the restart counts of their containers."""
    return {
        (uid, container["restartCount"])
        for uid, pod in stage.pods().items()
        for container in pod["status"]["containerStatuses"]
    }
