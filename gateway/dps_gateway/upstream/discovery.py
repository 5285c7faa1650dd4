"""Discover the replicas behind a Kubernetes Service by watching its EndpointSlices.

Every watch ends after a few minutes and is followed by a new list, so missed events are corrected. While the API
server is unavailable, the last known replicas are kept.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from dps_gateway.config import ConfigError, ServiceRef

log = logging.getLogger(__name__)

WATCH_SECONDS: Final = 240
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class WatchExpired(Exception):
    """The watch cannot be resumed from its resource version; a new list is required."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """How a pod connects to its API server. The token is read for every request, because the kubelet rotates it."""

    url: str
    token_file: Path
    ca_file: Path

    @classmethod
    def of_pod(
        cls, environment: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT
    ) -> "ApiServer":
        """The API server of the cluster that this process runs in. Raises ConfigError outside a cluster."""
        host, port = (
            environment.get("KUBERNETES_SERVICE_HOST"),
            environment.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        if host is None or not (account / "token").exists():
            raise ConfigError(
                "pools: 'service' requires a Kubernetes pod with a service account; use 'endpoints' elsewhere"
            )
        bracketed = f"[{host}]" if ":" in host else host
        return cls(f"https://{bracketed}:{port}", account / "token", account / "ca.crt")

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}

    def ssl(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=str(self.ca_file)) if self.url.startswith("https") else False


def replica_urls(
    slices: Iterable[Mapping[str, Any]], port: int, known: Collection[str] = frozenset()
) -> list[str]:
    """URLs of the ready endpoints. `port` selects among several slice ports.

    If no endpoint is ready, endpoints that are terminating but still serving are used, as in kube-proxy (KEP-1669),
    until a replacement is ready. If no endpoint is serving either, the `known` endpoints that are not terminating
    are kept: a control plane that has lost contact with its nodes reports every pod as not ready, and the gateway's
    health checks detect engines that have really failed.
    """
    ready: set[str] = set()
    terminating: set[str] = set()
    unready: set[str] = set()
    for endpoint_slice in slices:
        ports = [each["port"] for each in endpoint_slice.get("ports") or [] if each.get("port")]
        if not ports:
            continue
        chosen = port if port in ports else ports[0]
        ipv6 = endpoint_slice.get("addressType") == "IPv6"
        for endpoint in endpoint_slice.get("endpoints") or []:
            conditions = endpoint.get("conditions") or {}
            urls = {
                f"http://[{address}]:{chosen}" if ipv6 else f"http://{address}:{chosen}"
                for address in endpoint["addresses"]
            }
            if conditions.get("ready") is not False:  # absent means ready
                ready |= urls
            elif conditions.get("serving") and conditions.get("terminating"):
                terminating |= urls
            elif not conditions.get("terminating"):
                unready |= urls.intersection(known)
    return sorted(ready or terminating or unready)


class _Replicas:
    """Reports the replicas in a Service's slices, and keeps them in case none is ready later."""

    def __init__(self, port: int, report: Callable[[list[str]], None]) -> None:
        self._port = port
        self._report = report
        self._known: list[str] = []

    def update(self, slices: Iterable[Mapping[str, Any]]) -> None:
        self._known = replica_urls(slices, self._port, self._known)
        self._report(self._known)


async def watch_service(api: ApiServer, service: ServiceRef, on_change: Callable[[list[str]], None]) -> None:
    """Call `on_change` with the URLs of the ready replicas after every event, until cancelled."""
    replicas = _Replicas(service.port, on_change)
    pause = FIRST_PAUSE_SECONDS
    connector = aiohttp.TCPConnector(ssl=api.ssl())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SECONDS + 30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while True:
            try:
                await _follow(session, api, service, replicas)
                pause = FIRST_PAUSE_SECONDS
            except (aiohttp.ClientError, OSError, TimeoutError, WatchExpired, ValueError) as error:
                log.warning(
                    "watching the endpoints of %s/%s failed: %s; retrying in %.1f s",
                    service.namespace,
                    service.name,
                    error,
                    pause,
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _follow(
    session: aiohttp.ClientSession, api: ApiServer, service: ServiceRef, replicas: _Replicas
) -> None:
    """List the Service's EndpointSlices, then follow one watch until it ends."""
    url = f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"
    query = {"labelSelector": f"kubernetes.io/service-name={service.name}"}
    async with session.get(url, params=query, headers=api.headers()) as response:
        response.raise_for_status()
        listed = orjson.loads(await response.read())
    slices = {item["metadata"]["name"]: item for item in listed["items"]}
    replicas.update(slices.values())
    query |= {
        "watch": "true",
        "resourceVersion": listed["metadata"]["resourceVersion"],
        "timeoutSeconds": str(WATCH_SECONDS),
        "allowWatchBookmarks": "true",
    }
    async with session.get(
        url, params=query, headers=api.headers(), read_bufsize=MAX_EVENT_BYTES
    ) as response:
        response.raise_for_status()
        async for line in response.content:
            event = orjson.loads(line)
            match event["type"]:
                case "ADDED" | "MODIFIED":
                    slices[event["object"]["metadata"]["name"]] = event["object"]
                case "DELETED":
                    slices.pop(event["object"]["metadata"]["name"], None)
                case "BOOKMARK":
                    continue
                case _:
                    raise WatchExpired(str(event["object"].get("message", event["type"])))
            replicas.update(slices.values())
