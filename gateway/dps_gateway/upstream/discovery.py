"""The replicas behind a Kubernetes Service, followed through its EndpointSlices.

List, then watch, and trust neither: a watch ends after a few minutes at the latest and everything is listed anew.
While the API server is away the replicas that were known stay.
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


class ListAgain(Exception):
    """The watch cannot go on from where it is."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """How a pod reaches its cluster's API server. The token is read anew each time: the kubelet renews it."""

    url: str
    token_file: Path
    ca_file: Path

    @classmethod
    def of_pod(
        cls, environment: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT
    ) -> "ApiServer":
        """The API server of the pod this runs in. Raises ConfigError outside of a cluster."""
        host, port = (
            environment.get("KUBERNETES_SERVICE_HOST"),
            environment.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        if host is None or not (account / "token").exists():
            raise ConfigError(
                "pools: 'service' works in a Kubernetes pod with a service account; elsewhere give 'endpoints'"
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
    """The URLs of all endpoints that are ready. `port` is the one wanted, should a slice have several.

    Where none is, those that are going away and still serve, as kube-proxy does it (KEP-1669): a pool whose only pod
    was deleted serves on until that pod is told to stop, and with luck its successor is there by then. Where there
    are none of these either, those that stay of the `known` ones: a control plane that cannot see its nodes calls
    every pod not ready, and an engine that has indeed failed is found out by the gateway itself.
    """
    ready: set[str] = set()
    going: set[str] = set()
    staying: set[str] = set()
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
                going |= urls
            elif not conditions.get("terminating"):
                staying |= urls.intersection(known)
    return sorted(ready or going or staying)


class _Found:
    """Tells of the replicas in a Service's slices, and remembers them for when none is ready."""

    def __init__(self, port: int, tell: Callable[[list[str]], None]) -> None:
        self._port = port
        self._tell = tell
        self._known: list[str] = []

    def see(self, slices: Iterable[Mapping[str, Any]]) -> None:
        self._known = replica_urls(slices, self._port, self._known)
        self._tell(self._known)


async def watch_service(api: ApiServer, service: ServiceRef, found: Callable[[list[str]], None]) -> None:
    """Call `found` with the ready replicas whenever they change, for ever."""
    replicas = _Found(service.port, found)
    pause = FIRST_PAUSE_SECONDS
    connector = aiohttp.TCPConnector(ssl=api.ssl())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SECONDS + 30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while True:
            try:
                await _follow(session, api, service, replicas)
                pause = FIRST_PAUSE_SECONDS
            except (aiohttp.ClientError, OSError, TimeoutError, ListAgain, ValueError) as error:
                log.warning(
                    "endpoints of %s/%s: %s; again in %.1f s", service.namespace, service.name, error, pause
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _follow(
    session: aiohttp.ClientSession, api: ApiServer, service: ServiceRef, replicas: _Found
) -> None:
    """One list and one watch after it."""
    url = f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"
    query = {"labelSelector": f"kubernetes.io/service-name={service.name}"}
    async with session.get(url, params=query, headers=api.headers()) as response:
        response.raise_for_status()
        listed = orjson.loads(await response.read())
    slices = {item["metadata"]["name"]: item for item in listed["items"]}
    replicas.see(slices.values())
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
                    raise ListAgain(str(event["object"].get("message", event["type"])))
            replicas.see(slices.values())
