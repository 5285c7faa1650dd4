"""The API server: server-side apply, the few other calls that reconciling needs, their errors."""

import asyncio
import json
import time
from typing import Any, Protocol

import aiohttp
from kubernetes.aio import client, config
from prometheus_client import Counter, Histogram

from dps_operator.errors import (
    AlreadyExistsError,
    ClusterError,
    NotFoundError,
    NotInstalledError,
    RejectedError,
    TimedOutError,
)
from dps_operator.kinds import ROUTER, Kind, kind_of
from dps_operator.resources import MANAGED_BY, Manifest

REQUESTS = Counter("dps_operator_api_requests_total", "Calls of the API server", ["verb", "kind", "code"])
SECONDS = Histogram("dps_operator_api_request_seconds", "Duration of calls of the API server", ["verb"])

APPLY = {"Content-Type": "application/apply-patch+yaml"}
MERGE = {"Content-Type": "application/merge-patch+json"}
PAGE = 500
RETRY_DELAYS = (0.1, 0.3, 0.9)
MAX_BACKOFF = 5.0
"""Seconds between the tries of one call, and the most that it waits at the server's wish."""
REPAIR = "dps-operator-repair"
"""Field manager of merge patches, so that they do not count as applied."""


class Cluster(Protocol):
    """What reconciling asks of the API server. Everything raises ClusterError."""

    async def apply(self, manifest: Manifest, *, manager: str = MANAGED_BY) -> Manifest:
        """Server-side apply with force; returns the object as it is now."""

    async def apply_status(self, namespace: str, name: str, status: Manifest) -> Manifest:
        """Server-side apply of a DPSRouter's status."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """One object. NotFoundError where there is none."""

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Manifest]:
        """All objects with these labels, of one namespace or of all."""

    async def create(self, manifest: Manifest) -> Manifest:
        """A new object. AlreadyExistsError where its name is taken."""

    async def merge(self, kind: Kind, namespace: str, name: str, change: Manifest) -> None:
        """A merge patch: lists are replaced whole, whoever put something in them."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete that very object, and what it owns; nothing happens where it is gone or another one."""


def error_from(status: int, reason: str, body: Any, retry_after: str | None = None) -> ClusterError:
    """The error that an answer of the API server stands for.

    A 404 without `details.name` is about the path: the kind is not installed. A 422 or 400 is the object's.
    """
    details: dict[str, Any] = {}
    message = reason
    try:
        answer = json.loads(body)
        message = str(answer.get("message") or reason)
        details = answer.get("details") or {}
    except (ValueError, TypeError, AttributeError):
        pass
    message = message[:1024]
    if status == 404:
        return NotFoundError(message, status) if details.get("name") else NotInstalledError(message, status)
    if status == 409 and isinstance(body, str | bytes) and "AlreadyExists" in str(body):
        return AlreadyExistsError(message, status)
    if status in (400, 422):
        return RejectedError(message, status)
    wait = float(retry_after) if retry_after and retry_after.isdigit() else None
    return ClusterError(message, status, wait)


class KubernetesCluster:
    """The real API server, by way of the kubernetes package's asyncio half."""

    def __init__(self, api: client.ApiClient, seconds: float) -> None:
        self._api = api
        self._seconds = seconds

    @classmethod
    async def connect(cls, seconds: float) -> "KubernetesCluster":
        """A connection by the pod's service account or the kubeconfig. A call may take so many seconds."""
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            await config.load_kube_config(client_configuration=configuration)
        return cls(client.ApiClient(configuration), seconds)

    async def close(self) -> None:
        """Give the connections back."""
        await self._api.close()

    async def _call(
        self,
        method: str,
        kind: Kind,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """One call, repeated soon where the server had a bad moment: whatever the operator asks is idempotent.

        A pass has many calls, and would hardly ever end if each of them had to succeed at once.
        """
        for pause in RETRY_DELAYS:
            try:
                return await self._call_once(method, kind, path, query, body, headers)
            except TimedOutError:
                raise
            except ClusterError as error:
                if not error.transient:
                    raise
                await asyncio.sleep(min(error.retry_after or pause, MAX_BACKOFF))
        return await self._call_once(method, kind, path, query, body, headers)

    async def _call_once(
        self,
        method: str,
        kind: Kind,
        path: str,
        query: dict[str, str] | None,
        body: Any,
        headers: dict[str, str] | None,
    ) -> Any:
        sent = {"Accept": "application/json", **(headers or {})}
        parameters = list((query or {}).items())
        await self._api.update_params_for_auth(sent, parameters, ["BearerToken"])
        started, code = time.monotonic(), "none"
        try:
            answer = await self._api.rest_client.request(
                method,
                self._api.configuration.host + path,
                query_params=parameters,
                headers=sent,
                body=body,
                _request_timeout=self._seconds,
            )
            code = str(answer.status)
            return json.loads(answer.data)
        except client.ApiException as error:
            code = str(error.status)
            retry_after = error.headers.get("Retry-After") if error.headers else None
            raise error_from(error.status or 0, str(error.reason), error.body, retry_after) from error
        except TimeoutError as error:
            raise TimedOutError(f"the API server did not answer within {self._seconds:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ClusterError(
                f"the API server cannot be reached: {error or type(error).__name__}"
            ) from error
        finally:
            REQUESTS.labels(method, kind.name, code).inc()
            SECONDS.labels(method).observe(time.monotonic() - started)

    async def apply(self, manifest: Manifest, *, manager: str = MANAGED_BY) -> Manifest:
        """See Cluster."""
        kind, metadata = kind_of(manifest), manifest["metadata"]
        query = {"fieldManager": manager, "force": "true"}
        path = kind.path(metadata["namespace"], metadata["name"])
        answer: Manifest = await self._call("PATCH", kind, path, query, manifest, APPLY)
        return answer

    async def apply_status(self, namespace: str, name: str, status: Manifest) -> Manifest:
        """See Cluster."""
        body = {
            "apiVersion": ROUTER.api_version,
            "kind": ROUTER.name,
            "metadata": {"name": name, "namespace": namespace},
            "status": status,
        }
        query = {"fieldManager": MANAGED_BY, "force": "true"}
        path = ROUTER.path(namespace, name) + "/status"
        answer: Manifest = await self._call("PATCH", ROUTER, path, query, body, APPLY)
        return answer

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """See Cluster."""
        answer: Manifest = await self._call("GET", kind, kind.path(namespace, name))
        return answer

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Manifest]:
        """See Cluster. Lists by pages, so that a large cluster does not fill the memory."""
        items: list[Manifest] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._call("GET", kind, kind.path(namespace), query)
            items += page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return items
            query["continue"] = token

    async def create(self, manifest: Manifest) -> Manifest:
        """See Cluster."""
        kind = kind_of(manifest)
        path = kind.path(manifest["metadata"]["namespace"])
        answer: Manifest = await self._call("POST", kind, path, {"fieldManager": MANAGED_BY}, manifest)
        return answer

    async def merge(self, kind: Kind, namespace: str, name: str, change: Manifest) -> None:
        """See Cluster."""
        await self._call("PATCH", kind, kind.path(namespace, name), {"fieldManager": REPAIR}, change, MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """See Cluster."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._call("DELETE", kind, kind.path(namespace, name), body=body)
        except NotFoundError:
            return
        except ClusterError as error:
            if error.status != 409:
                raise
