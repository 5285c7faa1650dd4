"""What the operator knows of the cluster: the fields of each object that reconciling reads, and what loops find."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dps_engines.pools import PoolName
from dps_operator.api import Allocation
from dps_operator.diagnose import (
    CacheHealth,
    Calibrated,
    Problem,
    awaiting_volumes,
    calibrated,
    is_ready,
    problem,
    unmounted,
)
from dps_operator.objects import (
    COMPONENT_LABEL,
    ENGINE,
    MANAGED_BY,
    ROUTER,
    ROUTER_LABEL,
    SPEC_HASH,
    TEMPLATE_HASH,
    ChildKey,
    Key,
    Manifest,
    condition,
    digest,
)

ROUTER_METADATA = ("name", "namespace", "uid", "generation", "resourceVersion", "deletionTimestamp")
"""The fields of a DPSRouter's metadata that are cached."""


@dataclass(frozen=True)
class Replicas:
    """Replica counts of a Deployment or StatefulSet."""

    desired: int
    existing: int
    ready: int
    """Available replicas: ready for at least minReadySeconds."""
    settled: bool
    """Whether the newest spec has been observed, and all replicas are up to date and available."""
    updated: bool
    """Whether the newest spec has been observed, and no pod of an older template remains."""
    failure: str
    """Why pods cannot be created, for example a quota or a policy; empty if they can."""
    stalled: str
    """Why the rollout has exceeded its progress deadline; empty if it has not."""


NO_REPLICAS = Replicas(0, 0, 0, settled=False, updated=False, failure="", stalled="")
"""Those of the other kinds, and of a workload that does not exist."""


@dataclass(frozen=True)
class Child:
    """A child object of a DPSRouter."""

    kind: str
    name: str
    uid: str
    owner_uid: str
    """UID of the controlling DPSRouter; empty if the object has no controller or another one."""
    controlled_by_router: bool
    """Whether the controller is a DPSRouter, possibly a deleted one."""
    resource_version: int
    owned: str
    """Digest of the fields that the operator owns. It changes when another field manager takes over a field."""
    owns_replicas: bool
    template_hash: str
    replicas: Replicas
    spec_hash: str = ""
    """Digest of the fields of the spec for which the pod template was generated; only set for engines."""
    engine: str = ""
    """Runtime and version of a pool's engines."""
    image: str = ""
    """Image of a Deployment's first container."""
    scaling_failure: str | None = None
    """Why a HorizontalPodAutoscaler does not determine the number of replicas.

    Empty if it does, or if its target has been scaled to zero. None for other kinds, or until it has been evaluated."""
    route_failure: str | None = None
    """Why a controller rejects an HTTPRoute; empty if all have accepted it.

    None for other kinds, or until a controller of each Gateway has evaluated it."""


@dataclass(frozen=True)
class Pod:
    """A pod of a component."""

    name: str
    component: str
    terminating: bool
    problem: Problem | None
    uid: str = ""
    resource_version: int = 0
    ip: str = ""
    """Address of the pod; empty if it has none yet."""
    ready: bool = False
    """Whether its condition Ready is True."""
    calibrated: Calibrated | None = None
    """The end of a calibration; None for other pods."""
    awaiting_volumes: bool = False
    """Whether its volumes may not be mounted yet, and nothing else is known to keep it from being ready."""


def router_key(body: Manifest) -> Key:
    """Key of the DPSRouter that a labelled object belongs to."""
    metadata = body["metadata"]
    return metadata["namespace"], metadata.get("labels", {}).get(ROUTER_LABEL, "")


def _replicas(body: Manifest) -> Replicas:
    if body["kind"] not in ("Deployment", "StatefulSet"):
        return NO_REPLICAS
    status = body.get("status", {})
    desired = body["spec"].get("replicas", 1)
    existing, ready = status.get("replicas", 0), status.get("availableReplicas", 0)
    observed = status.get("observedGeneration", 0) >= body["metadata"].get("generation", 0)
    failure, progress = condition(body, "ReplicaFailure"), condition(body, "Progressing")
    failed, stalled = failure.get("status") == "True", progress.get("reason") == "ProgressDeadlineExceeded"
    return Replicas(
        desired=desired,
        existing=existing,
        ready=ready,
        settled=observed and existing == ready == status.get("updatedReplicas", 0) == desired,
        updated=observed and existing == status.get("updatedReplicas", 0),
        failure=failure.get("message", "pods cannot be created") if failed else "",
        stalled=progress.get("message", "the progress deadline was exceeded") if stalled else "",
    )


def _scaling_failure(body: Manifest) -> str | None:
    if body["kind"] != "HorizontalPodAutoscaler" or not body.get("status", {}).get("conditions"):
        return None
    for type in ("AbleToScale", "ScalingActive"):
        found = condition(body, type)
        if found.get("status") == "False" and found.get("reason") != "ScalingDisabled":
            return str(found.get("message", type))
    return ""


def _route_failure(body: Manifest) -> str | None:
    if body["kind"] != "HTTPRoute":
        return None
    generation = body["metadata"].get("generation", 0)
    conditions = [
        each
        for parent in body.get("status", {}).get("parents", [])
        for each in parent.get("conditions", [])
        if each["type"] in ("Accepted", "ResolvedRefs")
        and each.get("observedGeneration", generation) >= generation
    ]
    failures = [each.get("message") or each["reason"] for each in conditions if each["status"] == "False"]
    if failures:
        return str(failures[0])
    accepted = [each for each in conditions if each["type"] == "Accepted"]
    return "" if len(accepted) >= len(body["spec"].get("parentRefs", [])) else None


def observed_child(body: Manifest) -> Child:
    """The cached fields of a child."""
    metadata = body["metadata"]
    owners: list[Manifest] = metadata.get("ownerReferences", [])
    owner = next((one for one in owners if one.get("controller")), {})
    ours = owner.get("kind") == ROUTER.name and owner.get("apiVersion") == ROUTER.api_version
    annotations = metadata.get("annotations", {})
    applied = [
        entry.get("fieldsV1", {})
        for entry in metadata.get("managedFields", [])
        if entry.get("manager") == MANAGED_BY
        and entry.get("operation") == "Apply"
        and not entry.get("subresource")
    ]
    fields: dict[str, Any] = applied[0] if applied else {}
    containers = body["spec"]["template"]["spec"]["containers"] if body["kind"] == "Deployment" else [{}]
    return Child(
        kind=body["kind"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        owner_uid=owner.get("uid", "") if ours else "",
        controlled_by_router=ours,
        resource_version=int(metadata.get("resourceVersion", 0)),
        owned=digest(fields),
        owns_replicas="f:replicas" in fields.get("f:spec", {}),
        template_hash=annotations.get(TEMPLATE_HASH, ""),
        replicas=_replicas(body),
        spec_hash=annotations.get(SPEC_HASH, ""),
        engine=annotations.get(ENGINE, ""),
        image=containers[0].get("image", ""),
        scaling_failure=_scaling_failure(body),
        route_failure=_route_failure(body),
    )


def observed_pod(body: Manifest) -> Pod:
    """The cached fields of a pod."""
    metadata = body["metadata"]
    component = metadata.get("labels", {}).get(COMPONENT_LABEL, "")
    diagnosis = problem(body, component)
    return Pod(
        name=metadata["name"],
        component=component,
        terminating=bool(metadata.get("deletionTimestamp")),
        problem=diagnosis,
        uid=metadata.get("uid", ""),
        resource_version=int(metadata.get("resourceVersion", 0)),
        ip=body.get("status", {}).get("podIP", ""),
        ready=is_ready(body),
        calibrated=calibrated(body) if component == "calibration" else None,
        awaiting_volumes=diagnosis is not None and diagnosis.reason == "Starting" and awaiting_volumes(body),
    )


@dataclass
class _Listing:
    """A full listing in progress."""

    missing: set[str]
    """UIDs of the objects that were cached when it began, and of which nothing has been seen since."""
    deleted: set[str] = field(default_factory=set)
    """UIDs of the objects that were deleted since it began."""


class Observations:
    """All DPSRouters, their children and pods, updated from listings, watch events and API responses.

    The loops that read events and metrics add what they find and decide, by DPSRouter.
    """

    def __init__(self) -> None:
        self.routers: dict[Key, Manifest] = {}
        self._children: dict[Key, dict[ChildKey, Child]] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}
        self.unmounted: dict[Key, dict[str, str]] = {}
        """Messages about volumes that cannot be mounted, by name of the pod."""
        self.allocations: dict[Key, Allocation] = {}
        """The autoscaler's allocations of GPU budgets that are newer than those in the status."""
        self.idle: dict[Key, dict[PoolName, bool]] = {}
        """Whether a pool is scaled to zero, for the pools about which the autoscaler of this process has decided."""
        self.unmeasured: dict[Key, str] = {}
        """Why the gateways' metrics cannot be read; empty if they can."""
        self.cache_health: dict[Key, CacheHealth] = {}
        """What is known of the common prefix caches."""
        self._listing: _Listing | None = None

    @contextmanager
    def listing(self) -> Iterator[None]:
        """A full listing of all objects, each of which the block passes to an update.

        Objects that neither the listing nor an event has shown in the meantime have been deleted without an event, and
        are forgotten at the end. A block that raises an exception forgets nothing.
        """
        listing = self._listing = _Listing(
            {_uid(one) for cached in self._caches() for one in cached.values()}
        )
        try:
            yield
            for cached in self._caches():
                for name in [name for name, one in cached.items() if _uid(one) in listing.missing]:
                    del cached[name]
        finally:
            self._listing = None

    def _caches(self) -> list[dict[Any, Any]]:
        return [self.routers, *self._children.values(), *self._pods.values()]

    def update_router(self, body: Manifest, *, deleted: bool = False) -> Key:
        """Update a DPSRouter. A copy older than the cached one is ignored, as is the deletion of an earlier object."""
        metadata = body["metadata"]
        key = metadata["namespace"], metadata["name"]
        kept = {field: metadata[field] for field in ROUTER_METADATA if metadata.get(field) is not None}
        seen = {"metadata": kept, "spec": body.get("spec", {}), "status": body.get("status", {})}
        self._update(self.routers, key, seen, deleted=deleted)
        return key

    def update_child(self, body: Manifest, *, deleted: bool = False) -> Key:
        """Update a child. A copy older than the cached one is ignored."""
        key, seen = router_key(body), observed_child(body)
        self._update(self._children.setdefault(key, {}), (seen.kind, seen.name), seen, deleted=deleted)
        return key

    def update_pod(self, body: Manifest, *, deleted: bool = False) -> Key:
        """Update a pod. A copy older than the cached one is ignored.

        A pod that has ended, for example because the kubelet evicted it, is treated as deleted: it occupies no GPU, and
        its controller has replaced it. Only the result of a calibration is read from such a pod.
        """
        key, seen = router_key(body), observed_pod(body)
        ended = body.get("status", {}).get("phase") in ("Failed", "Succeeded")
        gone = deleted or (ended and seen.component != "calibration")
        self._update(self._pods.setdefault(key, {}), seen.name, seen, deleted=gone)
        return key

    def _update(
        self, cached: dict[Any, Any], name: Any, seen: Manifest | Child | Pod, *, deleted: bool
    ) -> None:
        uid, known = _uid(seen), cached.get(name)
        if self._listing is not None:
            self._listing.missing.discard(uid)
            if deleted:
                self._listing.deleted.add(uid)
            elif uid in self._listing.deleted:
                return  # the listing shows it although it has been deleted since
        if deleted:
            if known is not None and _uid(known) == uid:
                del cached[name]
        elif known is None or _uid(known) != uid or _version(seen) >= _version(known):
            cached[name] = seen

    def children(self, key: Key) -> dict[ChildKey, Child]:
        """The children of a DPSRouter, by kind and name."""
        return self._children.get(key, {})

    def pods(self, key: Key) -> list[Pod]:
        """The pods of a DPSRouter, sorted by name."""
        pods, failures = self._pods.get(key, {}), self.unmounted.get(key, {})
        return [
            replace(pods[name], problem=unmounted(name, failures[name]))
            if name in failures and pods[name].awaiting_volumes
            else pods[name]
            for name in sorted(pods)
        ]

    def awaiting_volumes(self) -> dict[Key, list[str]]:
        """The names of the pods whose volumes may not be mounted yet, by DPSRouter."""
        found = {
            key: [name for name, pod in pods.items() if pod.awaiting_volumes]
            for key, pods in self._pods.items()
        }
        return {key: names for key, names in found.items() if names}

    def forget(self, key: Key) -> None:
        """Remove what is known of a deleted DPSRouter."""
        found: tuple[dict[Key, Any], ...] = (self._children, self._pods, self.unmounted)
        for known in (*found, self.allocations, self.idle, self.unmeasured, self.cache_health):
            known.pop(key, None)


def _uid(seen: Manifest | Child | Pod) -> str:
    return str(seen["metadata"].get("uid", "")) if isinstance(seen, dict) else seen.uid


def _version(seen: Manifest | Child | Pod) -> int:
    return (
        int(seen["metadata"].get("resourceVersion", 0)) if isinstance(seen, dict) else seen.resource_version
    )
