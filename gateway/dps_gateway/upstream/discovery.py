"""Discover the replicas behind a Kubernetes Service by watching its EndpointSlices.

Every watch ends after a few minutes and is followed by a new list, so missed events are corrected. While the API
server is unavailable, the last known replicas are kept.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import aiohttp
import orjson

from dps_gateway.config import ServiceRef
from dps_gateway.kubernetes_api import ApiServer, keep_watching, watch_events


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
    """Call `on_change` with the URLs of the ready replicas after every event, until cancelled."""
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
