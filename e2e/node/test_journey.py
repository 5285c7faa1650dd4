"""A user's steps on a node that really runs the pods: apply a DPSRouter, send requests to it, delete it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise
from threading import Event, Thread

import httpx2
import pytest

from dps_local.processes import free_ports
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.paths import ROOT
from e2e.node.commands import run_script
from e2e.node.conftest import READY_SECONDS, RELEASE, emulated
from e2e.node.sessions import alternating, turns


def labels(name: str) -> str:
    """A selector of the objects that belong to a DPSRouter."""
    return f"dpsrouter.io/router={name}"


@pytest.fixture(scope="module")
def router(kube: Kube) -> str:
    """The name of a DPSRouter that is ready, whose engines require an API key. Tests that share it do not change it."""
    kube.kubectl("create", "secret", "generic", "engines", "--from-literal", "key=secret")
    manifest = emulated()
    manifest["spec"]["engine"]["apiKeySecretRef"] = {"name": "engines", "key": "key"}
    kube.apply(manifest)
    kube.until("emulated", READY_SECONDS, Ready="True", Progressing="Settled")
    return "emulated"


def test_helm_test_succeeds(system: Kube) -> None:
    assert "Phase:          Succeeded" in system.helm("test", RELEASE, "--timeout", "100s")


def test_first_request_to_a_ready_router_is_answered(node: Cluster, kube: Kube) -> None:
    router = emulated("eager")
    router["spec"]["gateway"]["replicas"] = 1
    with changing_services(kube):
        kube.apply(router)
        kube.kubectl("wait", "dpsrouter/eager", "--for=condition=Ready", "--timeout=110s")
        with node.reach(kube, "eager-gateway", 8000) as url:
            assert [turn.number for turn in turns(url, "emulated", alternating(1))] == [1]
    kube.kubectl("delete", "dpsrouter", "eager")


def test_turns_sent_through_the_service_are_routed_by_their_growth(
    node: Cluster, kube: Kube, router: str
) -> None:
    with node.reach(kube, f"{router}-gateway", 8000) as url:
        session = list(turns(url, "emulated", alternating(6)))
    assert [(turn.number, turn.pool, turn.reason) for turn in session] == [
        (1, "greedy", "over_threshold"),
        (2, "speculative", "within_threshold"),
        (3, "greedy", "over_threshold"),
        (4, "speculative", "within_threshold"),
        (5, "greedy", "over_threshold"),
        (6, "speculative", "within_threshold"),
    ]
    lengths = [turn.prompt_tokens for turn in session]
    assert [turn.engine_prompt_tokens for turn in session] == lengths
    assert [turn.delta_tokens for turn in session] == [
        lengths[0],
        *(after - before for before, after in pairwise(lengths)),
    ]


def test_engines_refuse_requests_without_their_api_key(node: Cluster, kube: Kube, router: str) -> None:
    with node.reach(kube, f"{router}-greedy", 30000) as url:
        models = f"{url}/v1/models"
        assert httpx2.get(models).status_code == 401
        assert httpx2.get(models, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_page_of_a_gateway_opens_with_the_commands_of_the_notes(kube: Kube, router: str) -> None:
    notes = (ROOT / "charts/dps-router/templates/NOTES.txt").read_text().replace("qwen-", f"{router}-")
    forward, password = (line for line in notes.splitlines() if f"{router}-" in line)
    (port,) = free_ports(1)
    curl = 'curl --silent --fail --user "user:$password"'
    script = f"""
        {forward.replace("9090", f"{port}:9090")} >/dev/null &
        password=$({password})
        {curl} --retry 9 --retry-connrefused http://localhost:{port}/
        {curl} --max-time 3 http://localhost:{port}/live || [ $? = 28 ]
    """
    printed = run_script(script, kube, 60.0)
    assert "<title>DPS Router</title>" in printed
    assert '"policy":"DeltaPrefill"' in printed


@contextmanager
def changing_services(kube: Kube) -> Iterator[None]:
    """Keep changing the endpoints of another Service, so that kube-proxy lags behind as on a busy cluster."""
    stopped = Event()

    def change() -> None:
        for last in cycle(range(1, 255)):
            kube.apply(endpoint(f"192.0.2.{last}"))
            if stopped.wait(0.1):
                return

    kube.kubectl("create", "service", "clusterip", "other", "--tcp=80")
    changes = Thread(target=change)
    changes.start()
    try:
        yield
    finally:
        stopped.set()
        changes.join()
        kube.kubectl("delete", "service/other", "endpointslice/other")


def endpoint(address: str) -> Manifest:
    """An EndpointSlice with the only endpoint of the Service `other`."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "other", "labels": {"kubernetes.io/service-name": "other"}},
        "addressType": "IPv4",
        "ports": [{"port": 80}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
    }
