"""Wiring to Kopf: every event is remembered, and wakes the DPSRouter that it belongs to."""

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
    """The event handlers, for the kinds of children that are installed.

    Kopf writes nothing to any object on their account: no annotation, no finalizer.
    """
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made, id="login")
    def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

    def watch(kind: Kind, see: Callable[..., Key]) -> None:
        @kopf.on.event(kind.group, kind.version, kind.plural, registry=made, id=f"see-{kind.plural}")
        async def seen(event: Any, **_: Any) -> None:
            # A copy in plain types: Kopf's own is a view. Items of an initial listing do not say their kind.
            body: Manifest = {"apiVersion": kind.api_version, "kind": kind.name, **event["object"]}
            key = see(body, deleted=event["type"] == "DELETED")
            if key in observations.routers or kind is ROUTER:
                queue.add(key)

    watch(ROUTER, observations.update_router)
    watch(POD, observations.update_pod)
    for kind in installed:
        watch(kind, observations.update_child)
    return made


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Kopf's settings: only objects of ours are watched, and no stream lives for long."""
    made = kopf.OperatorSettings()
    for kind in (POD, *CHILDREN):
        made.watching.label_selectors[kind.group, kind.version, kind.plural] = OWNED_SELECTOR
    made.watching.server_timeout = 300
    made.watching.client_timeout = 310
    made.watching.connect_timeout = settings.request_timeout
    made.networking.request_timeout = settings.request_timeout
    made.posting.enabled = False
    # Kinds that are installed later are found by the listings, without a right to the whole cluster's CRDs.
    made.scanning.disabled = True
    return made
