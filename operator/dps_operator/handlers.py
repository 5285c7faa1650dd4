"""Kopf event handlers: each event updates the cache and enqueues the DPSRouter that it belongs to."""

from collections.abc import Callable, Sequence
from typing import Any

import kopf

from dps_operator.kinds import CHILDREN, POD, ROUTER, Kind
from dps_operator.observe import Key, Observations
from dps_operator.resources import OWNED_SELECTOR, Manifest
from dps_operator.settings import Settings
from dps_operator.work_queue import WorkQueue


def registry(
    observations: Observations, queue: WorkQueue, installed: Sequence[Kind]
) -> kopf.OperatorRegistry:
    """Event handlers for DPSRouters, pods, and the installed kinds of children.

    Event handlers do not make Kopf add annotations or finalizers to objects.
    """
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers, id="login")
    def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

    def watch(kind: Kind, update: Callable[..., Key]) -> None:
        @kopf.on.event(kind.group, kind.version, kind.plural, registry=handlers, id=f"observe-{kind.plural}")
        async def observe(event: Any, **_: Any) -> None:
            # A copy, because Kopf passes a view. Items of an initial listing have no apiVersion and kind.
            body: Manifest = {"apiVersion": kind.api_version, "kind": kind.name, **event["object"]}
            key = update(body, deleted=event["type"] == "DELETED")
            if key in observations.routers or kind is ROUTER:
                queue.add(key)

    watch(ROUTER, observations.update_router)
    watch(POD, observations.update_pod)
    for kind in installed:
        watch(kind, observations.update_child)
    return handlers


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Kopf's settings: watch only objects of the operator, and reconnect watches every five minutes."""
    result = kopf.OperatorSettings()
    for kind in (POD, *CHILDREN):
        result.watching.label_selectors[kind.group, kind.version, kind.plural] = OWNED_SELECTOR
    result.watching.server_timeout = 300
    result.watching.client_timeout = 310
    result.watching.connect_timeout = settings.request_timeout
    result.networking.request_timeout = settings.request_timeout
    result.posting.enabled = False
    # Resync detects newly installed kinds, without cluster-wide permission to read CRDs.
    result.scanning.disabled = True
    # Otherwise, Kopf kills the process ten minutes after its watches have failed, although they are restarted.
    result.process.ultimate_exiting_timeout = None
    return result
