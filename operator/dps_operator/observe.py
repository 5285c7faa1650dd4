"""What the operator remembers of the cluster: the little of each object that decisions are made from."""

from dataclasses import dataclass
from typing import Any

from dps_operator.diagnose import Problem, problem
from dps_operator.kinds import ROUTER
from dps_operator.resources import (
    COMPONENT_LABEL,
    CONFIG_HASH,
    MANAGED_BY,
    ROUTER_LABEL,
    TEMPLATE_HASH,
    Manifest,
    digest,
)

Key = tuple[str, str]
"""Namespace and name of a DPSRouter."""
ChildKey = tuple[str, str]
"""Kind and name of one of its children."""


@dataclass(frozen=True)
class Replicas:
    """How far a Deployment or StatefulSet has come."""

    wanted: int
    existing: int
    ready: int
    """Those that were so for the Deployment's minReadySeconds."""
    settled: bool
    """Whether it has taken its newest spec in, and every replica is of it and ready."""
    failure: str
    """Why pods cannot even be made (a quota, a policy); empty where they can."""


@dataclass(frozen=True)
class Child:
    """An object that the operator made."""

    kind: str
    name: str
    uid: str
    owner_uid: str
    """uid of the controlling DPSRouter; empty where another or nobody controls it."""
    controlled_by_router: bool
    """Whether a DPSRouter controls it, which may be one that has been deleted since."""
    resource_version: int
    owned: str
    """Digest of the fields that are the operator's: it changes when somebody else takes one over."""
    owns_replicas: bool
    template_hash: str
    replicas: Replicas | None


@dataclass(frozen=True)
class Pod:
    """A pod of a component."""

    name: str
    component: str
    config_hash: str
    terminating: bool
    problem: Problem | None


def router_key(body: Manifest) -> Key:
    """The DPSRouter that a labelled object belongs to."""
    metadata = body["metadata"]
    return metadata["namespace"], metadata.get("labels", {}).get(ROUTER_LABEL, "")


def _owner(metadata: Manifest) -> Manifest:
    owners: list[Manifest] = metadata.get("ownerReferences", [])
    return next((owner for owner in owners if owner.get("controller")), {})


def _owned_fields(metadata: Manifest) -> dict[str, Any]:
    entries = [
        entry.get("fieldsV1", {})
        for entry in metadata.get("managedFields", [])
        if entry.get("manager") == MANAGED_BY
        and entry.get("operation") == "Apply"
        and not entry.get("subresource")
    ]
    return entries[0] if entries else {}


def _replicas(body: Manifest) -> Replicas | None:
    if body["kind"] not in ("Deployment", "StatefulSet"):
        return None
    status = body.get("status", {})
    wanted = body["spec"].get("replicas", 1)
    existing, ready = status.get("replicas", 0), status.get("availableReplicas", 0)
    taken_in = status.get("observedGeneration", 0) >= body["metadata"].get("generation", 0)
    failures = [
        condition.get("message", "pods cannot be created")
        for condition in status.get("conditions", [])
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True"
    ]
    return Replicas(
        wanted=wanted,
        existing=existing,
        ready=ready,
        settled=taken_in and existing == ready == status.get("updatedReplicas", 0) == wanted,
        failure=failures[0] if failures else "",
    )


def child(body: Manifest) -> Child:
    """What is remembered of a child."""
    metadata = body["metadata"]
    owner = _owner(metadata)
    ours = owner.get("kind") == ROUTER.name and owner.get("apiVersion") == ROUTER.api_version
    fields = _owned_fields(metadata)
    return Child(
        kind=body["kind"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        owner_uid=owner.get("uid", "") if ours else "",
        controlled_by_router=ours,
        resource_version=int(metadata.get("resourceVersion", 0)),
        owned=digest(fields),
        owns_replicas="f:replicas" in fields.get("f:spec", {}),
        template_hash=metadata.get("annotations", {}).get(TEMPLATE_HASH, ""),
        replicas=_replicas(body),
    )


def pod(body: Manifest) -> Pod:
    """What is remembered of a pod."""
    metadata = body["metadata"]
    component = metadata.get("labels", {}).get(COMPONENT_LABEL, "")
    return Pod(
        name=metadata["name"],
        component=component,
        config_hash=metadata.get("annotations", {}).get(CONFIG_HASH, ""),
        terminating=bool(metadata.get("deletionTimestamp")),
        problem=problem(body, component),
    )


class Observations:
    """What is known of every DPSRouter, its children and their pods. Fed by listings, watches and answers."""

    def __init__(self) -> None:
        self.routers: dict[Key, Manifest] = {}
        self._children: dict[Key, dict[ChildKey, Child]] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}

    def update_router(self, body: Manifest, *, deleted: bool = False) -> Key:
        """Take in a DPSRouter; an older copy than the known one is passed over."""
        metadata = body["metadata"]
        key = metadata["namespace"], metadata["name"]
        if deleted:
            self.routers.pop(key, None)
            return key
        known = self.routers.get(key)
        if known is None or _version(body) >= _version(known):
            kept = {
                field: metadata.get(field) for field in ROUTER_METADATA if metadata.get(field) is not None
            }
            self.routers[key] = {
                "metadata": kept,
                "spec": body.get("spec", {}),
                "status": body.get("status", {}),
            }
        return key

    def update_child(self, body: Manifest, *, deleted: bool = False) -> Key:
        """Take in a child; an older copy than the known one is passed over."""
        key = router_key(body)
        seen, family = child(body), self._children.setdefault(key, {})
        known = family.get((seen.kind, seen.name))
        if deleted:
            if known is not None and known.uid == seen.uid:
                del family[seen.kind, seen.name]
        elif known is None or known.uid != seen.uid or seen.resource_version >= known.resource_version:
            family[seen.kind, seen.name] = seen
        return key

    def update_pod(self, body: Manifest, *, deleted: bool = False) -> Key:
        """Take in a pod."""
        key = router_key(body)
        pods = self._pods.setdefault(key, {})
        if deleted:
            pods.pop(body["metadata"]["name"], None)
        else:
            pods[body["metadata"]["name"]] = pod(body)
        return key

    def replace_pod(self, key: Key, pod: Pod) -> None:
        """Take in what the operator itself just changed of a pod."""
        if pod.name in self._pods.get(key, {}):
            self._pods[key][pod.name] = pod

    def children(self, key: Key) -> dict[ChildKey, Child]:
        """The children of a DPSRouter by kind and name."""
        return self._children.get(key, {})

    def pods(self, key: Key) -> list[Pod]:
        """The pods of a DPSRouter, by name."""
        pods = self._pods.get(key, {})
        return [pods[name] for name in sorted(pods)]

    def forget(self, key: Key) -> None:
        """Drop what is known of the children of a DPSRouter that is gone."""
        self._children.pop(key, None)
        self._pods.pop(key, None)

    def replace(self, routers: list[Manifest], children: list[Manifest], pods: list[Manifest]) -> None:
        """Take in a full listing in place of all that was known."""
        self.routers, self._children, self._pods = {}, {}, {}
        for body in routers:
            self.update_router(body)
        for body in children:
            self.update_child(body)
        for body in pods:
            self.update_pod(body)


ROUTER_METADATA = ("name", "namespace", "uid", "generation", "resourceVersion", "deletionTimestamp")


def _version(body: Manifest) -> int:
    return int(body["metadata"].get("resourceVersion", 0))
