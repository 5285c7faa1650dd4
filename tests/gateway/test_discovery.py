"""Watches of the API server: discovery through EndpointSlices, and the ConfigMap of the configuration."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dps_gateway.config import ConfigError, ConfigMapRef, ServiceRef
from dps_gateway.kubernetes_api import ApiServer, replica_urls, watch_config_map, watch_service
from tests.gateway.servers import serving

ONE = "http://10.0.0.1:30000"
SERVICE = ServiceRef(name="demo-greedy", namespace="llm", port=30000)


def terminating(address: str, *, serving: bool = True) -> dict[str, Any]:
    """An endpoint of a deleted pod."""
    return {
        "addresses": [address],
        "conditions": {"ready": False, "serving": serving, "terminating": True},
    }


def endpoint_slice(name: str, *addresses: str, ready: bool | None = True, **extra: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 30000}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": ready}} for address in addresses],
    } | extra


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([endpoint_slice("a", "10.0.0.2", "10.0.0.1")], [ONE, "http://10.0.0.2:30000"], id="sorted"),
        pytest.param([endpoint_slice("a", "10.0.0.1", ready=False)], [], id="not ready"),
        pytest.param([endpoint_slice("a", "10.0.0.1", ready=None)], [ONE], id="absent means ready"),
        pytest.param([endpoint_slice("a", "10.0.0.1"), endpoint_slice("b", "10.0.0.1")], [ONE], id="once"),
        pytest.param([endpoint_slice("a", "fd00::1", addressType="IPv6")], ["http://[fd00::1]:30000"], id="IPv6"),
        pytest.param([endpoint_slice("a", "10.0.0.1", ports=[{"port": 9}, {"port": 30000}])], [ONE], id="ports"),
        pytest.param(
            [endpoint_slice("a", "10.0.0.1", ports=[{"port": 8080}])], ["http://10.0.0.1:8080"], id="target port"
        ),
        pytest.param([endpoint_slice("a", endpoints=[terminating("10.0.0.1")])], [ONE], id="the last one, terminating"),
        pytest.param([endpoint_slice("a", endpoints=[terminating("10.0.0.1", serving=False)])], [], id="terminated"),
        pytest.param(
            [endpoint_slice("a", endpoints=[terminating("10.0.0.9")]), endpoint_slice("b", "10.0.0.1")], [ONE],
            id="one terminating while another is ready",
        ),
        pytest.param([endpoint_slice("a", "10.0.0.1", ports=None, endpoints=None)], [], id="an empty slice"),
    ],
)  # fmt: skip
def test_ready_endpoints_become_replicas(slices: list[dict[str, Any]], expected: list[str]) -> None:
    assert replica_urls(slices, 30000) == expected


TWO = "http://10.0.0.2:30000"


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        pytest.param([endpoint_slice("a", "10.0.0.1", "10.0.0.2", ready=False)], [ONE], id="the known one is kept"),
        pytest.param([endpoint_slice("a", "10.0.0.2", ready=False)], [], id="never ready"),
        pytest.param([endpoint_slice("a", endpoints=[terminating("10.0.0.1", serving=False)])], [], id="terminating"),
        pytest.param([], [], id="removed"),
        pytest.param(
            [endpoint_slice("a", "10.0.0.1", ready=False), endpoint_slice("b", "10.0.0.2")], [TWO],
            id="one of two is not ready",
        ),
    ],
)  # fmt: skip
def test_known_replicas_are_kept_if_no_replica_is_ready(
    slices: list[dict[str, Any]], expected: list[str]
) -> None:
    """A control plane that has lost contact with its nodes reports every pod as not ready."""
    assert replica_urls(slices, 30000, known={ONE}) == expected


class FakeApiServer:
    """Lists `slices`, then sends whatever is put into `events`; None ends the watch."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.lists = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer token-of-the-pod"
        assert request.query["labelSelector"] == "kubernetes.io/service-name=demo-greedy"
        if "watch" not in request.query:
            self.lists += 1
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": self.slices})
        assert request.query["resourceVersion"] == "7"
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


async def test_expired_watch_is_followed_by_a_new_list(tmp_path: Path) -> None:
    fake = FakeApiServer()
    fake.slices = [endpoint_slice("a", "10.0.0.1")]
    (tmp_path / "token").write_text("token-of-the-pod\n")
    found: asyncio.Queue[list[str]] = asyncio.Queue()
    async with serving(fake.handle, "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices") as url:
        api = ApiServer(url, tmp_path / "token", tmp_path / "ca.crt")
        watching = asyncio.create_task(watch_service(api, SERVICE, found.put_nowait))
        try:
            assert await found.get() == ["http://10.0.0.1:30000"]
            fake.events.put_nowait({"type": "ADDED", "object": endpoint_slice("b", "10.0.0.2")})
            assert await found.get() == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
            fake.events.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}})
            fake.events.put_nowait({"type": "DELETED", "object": endpoint_slice("a")})
            assert await found.get() == ["http://10.0.0.2:30000"]
            unseen = endpoint_slice("b", "10.0.0.2", ready=False)
            fake.events.put_nowait({"type": "MODIFIED", "object": unseen})
            assert await found.get() == ["http://10.0.0.2:30000"]
            fake.slices = [endpoint_slice("c", "10.0.0.3")]
            fake.events.put_nowait(
                {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
            )
            assert await found.get() == ["http://10.0.0.3:30000"]
            fake.events.put_nowait(None)
            assert await found.get() == ["http://10.0.0.3:30000"]
            assert fake.lists == 3
        finally:
            watching.cancel()


CONFIG_MAP = ConfigMapRef(name="demo-gateway", namespace="llm")


async def test_content_of_the_config_map_is_received_at_first_and_after_each_change(tmp_path: Path) -> None:
    watches: list[asyncio.Queue[dict[str, Any] | None]] = [asyncio.Queue(), asyncio.Queue()]
    started = iter(watches)

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer token-of-the-pod"
        assert request.query["watch"] == "true"
        assert request.query["fieldSelector"] == "metadata.name=demo-gateway"
        response = web.StreamResponse()
        await response.prepare(request)
        events = next(started)
        while (event := await events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    def event(kind: str, **data: str) -> dict[str, Any]:
        return {"type": kind, "object": {"metadata": {"name": "demo-gateway"}, "data": data}}

    (tmp_path / "token").write_text("token-of-the-pod\n")
    found: asyncio.Queue[str] = asyncio.Queue()
    async with serving(handle, "/api/v1/namespaces/llm/configmaps") as url:
        api = ApiServer(url, tmp_path / "token", tmp_path / "ca.crt")
        watching = asyncio.create_task(watch_config_map(api, CONFIG_MAP, found.put_nowait))
        try:
            watches[0].put_nowait(event("ADDED", **{"config.yaml": "first"}))
            assert await found.get() == "first"
            watches[0].put_nowait(event("MODIFIED", other="text"))
            watches[0].put_nowait(event("DELETED", **{"config.yaml": "first"}))
            watches[0].put_nowait(None)
            watches[1].put_nowait(event("ADDED", **{"config.yaml": "second"}))
            assert await found.get() == "second"
        finally:
            watching.cancel()
            watches[1].put_nowait(None)


def test_service_is_rejected_outside_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'service' require a Kubernetes pod .* use 'endpoints'"):
        ApiServer.of_pod({}, tmp_path)
