"""Access to the API server: server-side apply, the other calls that reconciling needs, and their errors."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from prometheus_client import Counter, Histogram

from dps_operator.errors import (
    AlreadyExistsError,
    ClusterError,
    NotFoundError,
    NotInstalledError,
    RejectedError,
    SchemaError,
    TimedOutError,
)
from dps_operator.objects import MANAGED_BY, ROUTER, Kind, Manifest, kind_of

REQUESTS = Counter("dps_operator_api_requests_total", "API server requests", ["verb", "kind", "code"])
SECONDS = Histogram("dps_operator_api_request_seconds", "Duration of API server requests", ["verb"])

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
PAGE_OBJECTS = 500
"""Objects per page of a listing."""
RETRY_DELAYS = (0.1, 0.3, 0.9)
"""Seconds between the attempts of one call."""
MAX_RETRY_DELAY = 5.0
"""Upper bound of a delay that the server requests by Retry-After, in seconds."""
REPAIR = "dps-operator-repair"
"""Field manager of merge patches, separate from the one of server-side apply."""


def error_from(status: int, reason: str, body: Any, retry_after: str | None = None) -> ClusterError:
    """The exception for an error response of the API server.

    A 404 without `details.name` concerns the path: the kind is not installed. A 400 or 422 concerns the object. For
    server-side apply of an object that does not fit its schema, the API server returns 500 (kubernetes#122480); the
    exception's status is 400 then.
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
    if message.startswith("failed to create typed patch object"):
        return SchemaError(message, 400)
    if status == 404:
        return NotFoundError(message, status) if details.get("name") else NotInstalledError(message, status)
    if status == 409 and isinstance(body, str | bytes) and "AlreadyExists" in str(body):
        return AlreadyExistsError(message, status)
    if status in (400, 422):
        return RejectedError(message, status)
    wait = float(retry_after) if retry_after and retry_after.isdigit() else None
    return ClusterError(message, status, wait)


class Cluster:
    """The API server calls that reconciling needs. Those that are public may raise ClusterError."""

    def __init__(self, api: client.ApiClient, seconds: float) -> None:
        self._api = api
        self._seconds = seconds

    @classmethod
    @asynccontextmanager
    async def connect(cls, seconds: float) -> AsyncIterator["Cluster"]:
        """Connect with the pod's service account or the kubeconfig. `seconds` is the timeout of each call."""
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            await config.load_kube_config(client_configuration=configuration)
        async with client.ApiClient(configuration) as api:
            yield cls(api, seconds)

    async def _call(
        self,
        method: str,
        kind: Kind,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        patch: str = "",
    ) -> Manifest:
        """One call, retried after transient errors. patch: the content type of a patch.

        A retry is safe: a repeated create fails with AlreadyExistsError, and all other calls are idempotent.

        Retrying the call rather than the reconcile matters under load, because one reconcile makes many calls.
        """
        headers = {"Accept": "application/json"} | ({"Content-Type": patch} if patch else {})
        for pause in RETRY_DELAYS:
            try:
                return await self._call_once(method, kind, path, query or {}, body, headers)
            except TimedOutError:
                raise
            except ClusterError as error:
                if not error.transient:
                    raise
                await asyncio.sleep(min(error.retry_after or pause, MAX_RETRY_DELAY))
        return await self._call_once(method, kind, path, query or {}, body, headers)

    async def _call_once(
        self, method: str, kind: Kind, path: str, query: dict[str, str], body: Any, headers: dict[str, str]
    ) -> Manifest:
        sent, parameters = dict(headers), list(query.items())
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
            found: Manifest = json.loads(answer.data)
            return found
        except client.ApiException as error:
            code = str(error.status)
            retry_after = error.headers.get("Retry-After") if error.headers else None
            raise error_from(error.status or 0, str(error.reason), error.body, retry_after) from error
        except TimeoutError as error:
            raise TimedOutError(f"the API server did not respond within {self._seconds:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ClusterError(
                f"the API server cannot be reached: {error or type(error).__name__}"
            ) from error
        finally:
            REQUESTS.labels(method, kind.name, code).inc()
            SECONDS.labels(method).observe(time.monotonic() - started)

    async def apply(
        self, manifest: Manifest, *, manager: str = MANAGED_BY, subresource: str = ""
    ) -> Manifest:
        """Server-side apply with force; returns the resulting object."""
        kind, metadata = kind_of(manifest), manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"]) + subresource
        return await self._call(
            "PATCH", kind, path, {"fieldManager": manager, "force": "true"}, manifest, APPLY
        )

    async def apply_status(self, namespace: str, name: str, status: Manifest) -> Manifest:
        """Server-side apply of a DPSRouter's status."""
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": ROUTER.api_version, "kind": ROUTER.name, "metadata": metadata, "status": status}
        return await self.apply(body, subresource="/status")

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """One object. Raises NotFoundError if it does not exist."""
        return await self._call("GET", kind, kind.path(namespace, name))

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[list[Manifest]]:
        """All objects that match the label selector and the field selector, in one namespace or in all.

        The pages have a bounded size.
        """
        query = {"limit": str(PAGE_OBJECTS)} | ({"labelSelector": selector} if selector else {})
        query |= {"fieldSelector": fields} if fields else {}
        while True:
            page = await self._call("GET", kind, kind.path(namespace), query)
            yield page.pop("items")
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def create(self, manifest: Manifest) -> Manifest:
        """Create an object. Raises AlreadyExistsError if its name is taken."""
        kind = kind_of(manifest)
        path = kind.path(manifest["metadata"]["namespace"])
        return await self._call("POST", kind, path, {"fieldManager": MANAGED_BY}, manifest)

    async def merge(self, kind: Kind, namespace: str, name: str, change: Manifest) -> None:
        """Merge patch: replaces lists entirely, including items of other field managers."""
        await self._call("PATCH", kind, kind.path(namespace, name), {"fieldManager": REPAIR}, change, MERGE)

    async def strategic_merge(self, kind: Kind, namespace: str, name: str, change: Manifest) -> None:
        """Strategic merge patch: merges lists with a key, and removes fields that are None.

        Raises NotFoundError if the object does not exist, and ClusterError with status 409 if it has another UID than
        `change`.
        """
        query = {"fieldManager": MANAGED_BY}
        await self._call("PATCH", kind, kind.path(namespace, name), query, change, STRATEGIC_MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete an object and its dependents; a no-op if it is gone or has been replaced (UID precondition)."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._call("DELETE", kind, kind.path(namespace, name), body=body)
        except NotFoundError:
            return
        except ClusterError as error:
            if error.status != 409:
                raise
