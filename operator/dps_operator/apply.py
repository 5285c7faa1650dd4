"""Applies the children of a DPSRouter, and deletes those that are no longer desired."""

import logging
from collections.abc import Collection, Sequence

from dps_engines.pools import POOLS
from dps_operator.effective import Router
from dps_operator.errors import ClusterError, NotFoundError, RejectedError, SchemaError
from dps_operator.kube import Cluster
from dps_operator.objects import (
    BY_NAME,
    COMPONENT_LABEL,
    ChildKey,
    Key,
    Manifest,
    child_name,
    digest,
    kind_of,
)
from dps_operator.observe import Child, Observations, observed_child

HANDOVER = "dps-operator-handover"
"""Field manager that owns the field `replicas` until an autoscaler takes over the field."""

log = logging.getLogger(__name__)


def image_volumes(manifest: Manifest) -> set[str]:
    """The names of a Deployment's image volumes, which the API server removes if their feature gate is disabled."""
    if manifest["kind"] != "Deployment":
        return set()
    volumes = manifest["spec"]["template"]["spec"].get("volumes") or []
    return {volume["name"] for volume in volumes if "image" in volume}


class Applier:
    """Applies children server-side. Every method may raise ClusterError."""

    def __init__(self, cluster: Cluster, observations: Observations) -> None:
        self._cluster = cluster
        self._observations = observations
        self._applied: dict[Key, dict[ChildKey, tuple[str, str, str]]] = {}
        """For each child of a DPSRouter: the owner's UID and the digests of the last applied manifest and of the fields
        that the operator owned after that. They only avoid unnecessary applies."""

    async def apply(self, router: Router, manifest: Manifest) -> None:
        """Apply one child, unless the same manifest was applied and its fields are still owned by the operator.

        Raises RejectedError if this DPSRouter does not own the live object, or if the API server rejects the manifest.
        """
        name = manifest["kind"], manifest["metadata"]["name"]
        applied = digest(manifest)
        cached = self._observed(router).get(name)
        digests = self._applied.setdefault(router.key, {})
        inactive = self._leaves_autoscaler_inactive(router, manifest)
        if cached is not None and digests.get(name) == (router.uid, applied, cached.owned) and not inactive:
            return
        found = await self._find(router, manifest)
        if found is not None and (inactive or (found.owns_replicas and "replicas" not in manifest["spec"])):
            await self._hand_over_replicas(router, manifest, found)
        try:
            live = await self._cluster.apply(manifest)
        except SchemaError:
            # For a merge patch, the API server would ignore the unknown field.
            raise
        except RejectedError:
            if found is None:
                raise
            # Server-side apply keeps list items of other managers, which can make the result invalid; a merge patch
            # replaces the whole list.
            await self._cluster.merge(kind_of(manifest), router.namespace, found.name, manifest)
            live = await self._cluster.apply(manifest)
        self._observations.update_child(live)
        if image_volumes(manifest) - image_volumes(live):
            raise RejectedError(
                "this cluster does not support image volumes, which a source with oci requires; enable the feature "
                "gate ImageVolume, use Kubernetes 1.35 or newer, or use another source"
            )
        digests[name] = router.uid, applied, observed_child(live).owned

    async def prune(self, router: Router, desired: Sequence[Manifest], kept: Collection[str] = ()) -> None:
        """Delete the children that are no longer desired. kept: the names of those that are not deleted yet."""
        names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in desired}
        for name, extra in list(self._observed(router).items()):
            if name not in names and extra.name not in kept and extra.owner_uid == router.uid:
                log.info("deleting %s %s/%s: no longer desired", name[0], router.namespace, name[1])
                await self._cluster.delete(BY_NAME[extra.kind], router.namespace, extra.name, extra.uid)
                self._applied.get(router.key, {}).pop(name, None)

    def forget(self, key: Key) -> None:
        """Drop the digests of a deleted DPSRouter's children."""
        self._applied.pop(key, None)

    def _observed(self, router: Router) -> dict[ChildKey, Child]:
        return self._observations.children(router.key)

    async def _find(self, router: Router, manifest: Manifest) -> Child | None:
        """The live object, or None. Raises RejectedError if this DPSRouter does not own it."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = self._observed(router).get((kind, name))
        if found is None:
            try:
                found = observed_child(await self._cluster.get(kind_of(manifest), router.namespace, name))
            except NotFoundError:
                return None
        if found.owner_uid == router.uid:
            return found
        if found.controlled_by_router:
            raise ClusterError(
                f"{kind} {name} belongs to a deleted DPSRouter of the same name and has not been deleted yet"
            )
        raise RejectedError(
            "an object of that name exists and is not owned by this DPSRouter; delete it, or "
            "choose another name for the DPSRouter"
        )

    def _leaves_autoscaler_inactive(self, router: Router, manifest: Manifest) -> bool:
        """Whether it is a pool's Deployment without replicas, whose autoscaler is yet to be created.

        Another controller has scaled the pool to zero before.
        """
        if manifest["kind"] != "Deployment" or "replicas" in manifest["spec"]:
            return False
        name, observed = manifest["metadata"]["name"], self._observed(router)
        scaled = {child_name(router, pool.name) for pool in router.pools.values() if pool.has_autoscaler}
        if name not in scaled or ("HorizontalPodAutoscaler", name) in observed:
            return False
        found = observed.get(("Deployment", name))
        return found is not None and found.replicas.desired == 0

    async def _hand_over_replicas(self, router: Router, manifest: Manifest, found: Child) -> None:
        """Transfer ownership of `replicas` to a second field manager before the operator stops applying the field.

        Server-side apply would otherwise reset the field to its default. A pool without replicas starts with the
        minimum, because an autoscaler does not scale up a Deployment without replicas.
        """
        component = manifest["metadata"]["labels"][COMPONENT_LABEL]
        minimum = router.pools[component].min_replicas if component in POOLS else router.gateway_replicas
        keep = {key: manifest[key] for key in ("apiVersion", "kind")} | {
            "metadata": {key: manifest["metadata"][key] for key in ("name", "namespace")},
            "spec": {"replicas": found.replicas.desired or minimum},
        }
        await self._cluster.apply(keep, manager=HANDOVER)
