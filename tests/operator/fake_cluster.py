"""An in-memory API server with the operations that the reconciler needs: apply, field ownership, UIDs and deletion."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from dps_operator.errors import AlreadyExistsError, ClusterError, NotFoundError
from dps_operator.kube import Cluster
from dps_operator.objects import MANAGED_BY, ROUTER, Kind, Manifest

Name = tuple[str, str, str]


class FakeCluster(Cluster):
    """The calls on objects in memory. `fail` maps (verb, kind) to the error that such a call raises."""

    def __init__(self) -> None:
        self.objects: dict[Name, Manifest] = {}
        self.calls: Counter[str] = Counter()
        self.fail: dict[tuple[str, str], ClusterError] = {}
        self._version = 0

    def _called(self, verb: str, kind: str) -> None:
        self.calls[verb] += 1
        if error := self.fail.get((verb, kind)):
            raise error

    def _existing(self, kind: Kind, namespace: str, name: str) -> Manifest:
        try:
            return self.objects[kind.name, namespace, name]
        except KeyError:
            raise NotFoundError(name, 404) from None

    def store(self, manifest: Manifest, manager: str = MANAGED_BY) -> Manifest:
        """Store an object with UID, managed fields, generation and resource version; a no-op keeps both numbers.

        The generation counts the changes of the field `spec`, unless the manifest contains it.
        """
        name = (manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        before = self.objects.get(name, {})
        managers = before.get("metadata", {}).get("managedFields", [])
        others = [entry["fieldsV1"] for entry in managers if entry["manager"] != manager]
        for entry in managers:
            if entry["manager"] == manager:
                before = _without(before, entry["fieldsV1"], [_fields(manifest), *others])
        after = _merged(before, manifest)
        metadata = after["metadata"] = dict(after["metadata"])
        metadata.setdefault("uid", f"uid-{len(self.objects)}-{self._version}")
        entries = [entry for entry in metadata.get("managedFields", []) if entry["manager"] != manager]
        entry = {"manager": manager, "operation": "Apply", "fieldsV1": _fields(manifest)}
        metadata["managedFields"] = [*entries, entry]
        if after.get("spec") != self.objects.get(name, {}).get("spec"):
            metadata.setdefault("generation", 0)
            if "generation" not in manifest["metadata"]:
                metadata["generation"] += 1
        if after != self.objects.get(name):
            self._version += 1
            metadata["resourceVersion"] = str(self._version)
            self.objects[name] = after
        return self.objects[name]

    async def apply(
        self, manifest: Manifest, *, manager: str = MANAGED_BY, subresource: str = ""
    ) -> Manifest:
        self._called("apply", manifest["kind"])
        return self.store(manifest, manager)

    async def apply_status(self, namespace: str, name: str, status: Manifest) -> Manifest:
        self._called("status", ROUTER.name)
        router = self._existing(ROUTER, namespace, name)
        self._version += 1
        router["metadata"]["resourceVersion"] = str(self._version)
        router["status"] = status
        return router

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        self._called("get", kind.name)
        return self._existing(kind, namespace, name)

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[list[Manifest]]:
        self._called("list", kind.name)
        yield [manifest for (name, _, _), manifest in self.objects.items() if name == kind.name]

    async def create(self, manifest: Manifest) -> Manifest:
        self._called("create", manifest["kind"])
        metadata = manifest["metadata"]
        if (manifest["kind"], metadata["namespace"], metadata["name"]) in self.objects:
            raise AlreadyExistsError(metadata["name"], 409)
        return self.store(manifest)

    async def merge(self, kind: Kind, namespace: str, name: str, change: Manifest) -> None:
        self._called("merge", kind.name)
        live = await self.get(kind, namespace, name)
        version = live["metadata"].get("resourceVersion")
        if change.get("metadata", {}).get("resourceVersion", version) != version:
            raise ClusterError("the object has been modified", 409)
        self._version += 1
        merged = _merged(live, change)
        merged["metadata"]["resourceVersion"] = str(self._version)
        self.objects[kind.name, namespace, name] = merged

    async def strategic_merge(self, kind: Kind, namespace: str, name: str, change: Manifest) -> None:
        """A change of the owners and of the field `data`."""
        self._called("strategic_merge", kind.name)
        live = await self.get(kind, namespace, name)
        metadata = live["metadata"]
        if change["metadata"].get("uid", metadata["uid"]) != metadata["uid"]:
            raise ClusterError("the object has another UID", 409)
        owners = {owner["uid"]: owner for owner in metadata.get("ownerReferences", [])}
        owners |= {owner["uid"]: owner for owner in change["metadata"]["ownerReferences"]}
        kept = [owner for owner in owners.values() if "$patch" not in owner]
        data = live.get("data", {}) | change["data"]
        self._version += 1
        self.objects[kind.name, namespace, name] = {
            **live,
            "metadata": {**metadata, "ownerReferences": kept, "resourceVersion": str(self._version)},
            "data": {field: value for field, value in data.items() if value is not None},
        }

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._called("delete", kind.name)
        self.objects.pop((kind.name, namespace, name), None)

    def names(self, kind: str) -> set[str]:
        """The names of all objects of a kind."""
        return {name for found, _, name in self.objects if found == kind}

    def writes(self) -> int:
        """The number of write calls so far."""
        return sum(count for verb, count in self.calls.items() if verb not in ("get", "list"))


def _merged(base: Any, change: Any) -> Any:
    """A JSON merge patch (RFC 7396): objects merge by field, lists and scalars are replaced.

    Server-side apply additionally merges keyed lists, which no test of the reconciler depends on.
    """
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return base | {field: _merged(base.get(field), value) for field, value in change.items()}


def _without(base: Any, fields: Manifest, owned: list[Manifest]) -> Any:
    """An object without the fields that a manager no longer applies, unless others own them."""
    result = dict(base)
    for field, inner in fields.items():
        key, found = field.removeprefix("f:"), [one[field] for one in owned if field in one]
        if not found:
            result.pop(key, None)
        elif isinstance(result.get(key), dict):
            result[key] = _without(result[key], inner, found)
    return result


def _fields(value: Any) -> Any:
    """The fields of a manifest in fieldsV1 format."""
    if isinstance(value, dict):
        return {f"f:{key}": _fields(inner) for key, inner in value.items()}
    return {}
