"""The API server of the Kubernetes cluster that the gateway runs in, and watches of its ConfigMap and Services."""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from dps_gateway.config import ConfigError, ConfigMapRef, ServiceRef

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
                "'configMap' and 'service' require a Kubernetes pod with a service account; elsewhere, remove "
                "'configMap' and use 'endpoints'"
            )
        bracketed = f"[{host}]" if ":" in host else host
        return cls(f"https://{bracketed}:{port}", account / "token", account / "ca.crt")

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}

    def ssl(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=str(self.ca_file)) if self.url.startswith("https") else False


async def keep_watching(
    api: ApiServer, what: str, follow: Callable[[aiohttp.ClientSession], Awaitable[None]]
) -> None:
    """Call `follow`, which follows one watch until it ends, again and again until cancelled.

    Failures are retried with increasing pauses, and a watch that ends at once is reopened after a short one. what: the
    watched objects, for the log.
    """
    pause = FIRST_PAUSE_SECONDS
    connector = aiohttp.TCPConnector(ssl=api.ssl())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SECONDS + 30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while True:
            started = time.monotonic()
            try:
                await follow(session)
                pause = FIRST_PAUSE_SECONDS
                if time.monotonic() - started < FIRST_PAUSE_SECONDS:  # a proxy may close watches at once
                    await asyncio.sleep(FIRST_PAUSE_SECONDS)
            except (aiohttp.ClientError, OSError, TimeoutError, WatchExpired, ValueError) as error:
                log.warning("watching %s failed: %s; retrying in %.1f s", what, error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def watch_events(
    session: aiohttp.ClientSession, api: ApiServer, url: str, query: Mapping[str, str]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The type (ADDED, MODIFIED or DELETED) and object of each event of one watch, until it ends.

    Without a resourceVersion in `query`, the watch begins with ADDED events of the existing objects. Raises
    WatchExpired, or an aiohttp.ClientError or OSError if the API server fails.
    """
    options = {"watch": "true", "timeoutSeconds": str(WATCH_SECONDS), "allowWatchBookmarks": "true"}
    async with session.get(
        url, params={**query, **options}, headers=api.headers(), read_bufsize=MAX_EVENT_BYTES
    ) as response:
        response.raise_for_status()
        async for line in response.content:
            event = orjson.loads(line)
            match event["type"]:
                case "ADDED" | "MODIFIED" | "DELETED":
                    yield event["type"], event["object"]
                case "BOOKMARK":
                    continue
                case _:
                    raise WatchExpired(str(event["object"].get("message", event["type"])))


async def watch_config_map(api: ApiServer, config_map: ConfigMapRef, on_text: Callable[[str], None]) -> None:
    """Call `on_text` with the ConfigMap's configuration file at first and after every event, until cancelled."""
    url = f"{api.url}/api/v1/namespaces/{config_map.namespace}/configmaps"
    # With this selector, permission for the one ConfigMap is sufficient.
    query = {"fieldSelector": f"metadata.name={config_map.name}"}

    async def follow(session: aiohttp.ClientSession) -> None:
        async for kind, changed in watch_events(session, api, url, query):
            text = changed.get("data", {}).get(config_map.key)
            if kind != "DELETED" and text is not None:
                on_text(text)

    await keep_watching(api, f"the ConfigMap {config_map.namespace}/{config_map.name}", follow)


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


async def watch_service(api: ApiServer, service: ServiceRef, on_change: Callable[[list[str]], None]) -> None:
    """Call `on_change` with the URLs of a Service's ready replicas after every event of its EndpointSlices.

    Every watch ends after a few minutes and is followed by a new list, so missed events are corrected. While the API
    server is unavailable, the last known replicas are kept.
    """
    url = f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"
    query = {"labelSelector": f"kubernetes.io/service-name={service.name}"}
    known: list[str] = []

    def report(slices: Iterable[Mapping[str, Any]]) -> None:
        known[:] = replica_urls(slices, service.port, known)
        on_change(list(known))

    async def follow(session: aiohttp.ClientSession) -> None:
        """List the Service's EndpointSlices, then follow one watch until it ends."""
        async with session.get(url, params=query, headers=api.headers()) as response:
            response.raise_for_status()
            listed = orjson.loads(await response.read())
        slices = {item["metadata"]["name"]: item for item in listed["items"]}
        report(slices.values())
        since = {"resourceVersion": listed["metadata"]["resourceVersion"]}
        async for kind, changed in watch_events(session, api, url, query | since):
            if kind == "DELETED":
                slices.pop(changed["metadata"]["name"], None)
            else:
                slices[changed["metadata"]["name"]] = changed
            report(slices.values())

    await keep_watching(api, f"the endpoints of {service.namespace}/{service.name}", follow)
