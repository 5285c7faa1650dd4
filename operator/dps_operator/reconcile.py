"""Reconciles one DPSRouter: applies the desired children, prunes the rest, and updates the status."""

import logging
from collections.abc import Callable, Sequence

from prometheus_client import Gauge

from dps_engines.pools import POOLS
from dps_operator.build import children
from dps_operator.conditions import StatusInput
from dps_operator.credentials import ensure_credentials, forget_router
from dps_operator.diagnose import CacheHealth
from dps_operator.effective import Router, effective_router, live_engines
from dps_operator.errors import (
    AlreadyExistsError,
    ClusterError,
    NotFoundError,
    NotInstalledError,
    RejectedError,
    SchemaError,
    SpecError,
)
from dps_operator.kube import Cluster
from dps_operator.objects import (
    BY_NAME,
    COMPONENT_LABEL,
    ENGINE,
    SPEC_HASH,
    TEMPLATE_HASH,
    ChildKey,
    Key,
    Manifest,
    child_name,
    digest,
    kind_of,
)
from dps_operator.observe import Child, Observations, observed_child
from dps_operator.rollout import kept_pools, pool_on_hold, rolled_out, still_used
from dps_operator.settings import Settings
from dps_operator.status import build_status, events, invalid_spec_status

READY = Gauge(
    "dps_operator_router_ready",
    "1 while a DPSRouter is Ready; absent while it is suspended",
    ["router_namespace", "router"],
)
ROLLOUT_FAILED = Gauge(
    "dps_operator_rollout_failed",
    "1 while a rollout of a DPSRouter has exceeded its progress deadline",
    ["router_namespace", "router"],
)
REPLICAS = Gauge(
    "dps_operator_pool_replicas",
    "Engines that the Deployment of a pool requests; 0 while the pool is scaled to zero or its DPSRouter suspended",
    ["router_namespace", "router", "pool"],
)
RECORDED = (TEMPLATE_HASH, SPEC_HASH, ENGINE)
"""Annotations of a Deployment that describe its pod template."""
HANDOVER = "dps-operator-handover"
"""Field manager that owns the field `replicas` until an autoscaler takes over the field."""

log = logging.getLogger(__name__)


def image_volumes(manifest: Manifest) -> set[str]:
    """The names of a Deployment's image volumes, which the API server removes if their feature gate is disabled."""
    if manifest["kind"] != "Deployment":
        return set()
    volumes = manifest["spec"]["template"]["spec"].get("volumes") or []
    return {volume["name"] for volume in volumes if "image" in volume}


class Reconciler:
    """Reconciles DPSRouters from the cached observations. Level-based: the result does not depend on earlier events."""

    def __init__(
        self, cluster: Cluster, observations: Observations, settings: Settings, now: Callable[[], str]
    ) -> None:
        self._cluster = cluster
        self._observations = observations
        self._settings = settings
        self._now = now
        self._applied: dict[Key, dict[ChildKey, tuple[str, str, str]]] = {}
        """For each child of a DPSRouter: the owner's UID and the digests of the last applied manifest and of the fields
        that the operator owned after that. They only avoid unnecessary applies."""

    async def reconcile(self, key: Key) -> None:
        """Reconcile one DPSRouter. Raises ClusterError if the reconcile has to be retried."""
        body = self._observations.routers.get(key)
        if body is None:
            await self._forget(key)
            return
        metadata, before = body["metadata"], body["status"]
        if metadata.get("deletionTimestamp"):
            return
        try:
            router = effective_router(body, self._observations)
        except SpecError as error:
            generation = metadata.get("generation", 1)
            await self._update_status(key, invalid_spec_status(str(error), before, generation, self._now()))
            return
        found = StatusInput()
        await self._converge(router, found)
        for name, engine in live_engines(self._observations, router).items():
            REPLICAS.labels(*key, name).set(engine.replicas.desired)
        seen = self._observations
        found.children, found.pods = seen.children(key), seen.pods(key)
        found.unmeasured = seen.unmeasured.get(key)
        found.cache_health = seen.cache_health.get(key, CacheHealth())
        await self._update_status(key, build_status(router, found, before, self._now()))
        if found.failure is not None:
            raise found.failure

    async def _forget(self, key: Key) -> None:
        """Remove what is known of a deleted DPSRouter. Its children are garbage-collected."""
        self._observations.forget(key)
        self._applied.pop(key, None)
        READY.remove(*key)
        ROLLOUT_FAILED.remove(*key)
        for pool in POOLS:
            REPLICAS.remove(*key, pool)
        await forget_router(self._cluster, key)

    async def _converge(self, router: Router, outcome: StatusInput) -> None:
        """Apply the desired children and delete the others.

        Nothing is applied for a paused DPSRouter, but an invalid spec is reported.
        """
        paused = router.spec.paused
        try:
            store_revision = "" if paused else await ensure_credentials(self._cluster, router)
            desired = children(router, self._settings, store_revision)
        except (SpecError, RejectedError) as error:
            outcome.invalid = str(error)
            return
        except ClusterError as error:
            outcome.failure = error
            return
        if paused:
            return
        engines = live_engines(self._observations, router)
        outcome.kept = kept_pools(router, desired, engines)
        outcome.waiting_pool = pool_on_hold(desired, engines, outcome.kept)
        try:
            for manifest in desired:
                await self._apply(router, manifest, outcome)
            await self._remove(router, desired, outcome)
        except ClusterError as error:
            outcome.failure = error

    async def _remove(self, router: Router, desired: Sequence[Manifest], outcome: StatusInput) -> None:
        """Delete the children that are no longer desired. Raises ClusterError.

        Pods of an older template serve until they have been replaced, and may have to be restarted. So what they use is
        deleted only after that, and a rollout that cannot succeed can be reverted. A Deployment does not count pods
        that are terminating, although they complete their requests.
        """
        key = router.key
        draining = any(
            pod.terminating and pod.component in (*POOLS, "gateway") for pod in self._observations.pods(key)
        )
        finished = (
            not outcome.rejected
            and outcome.failure is None
            and outcome.waiting_pool is None
            and rolled_out(desired, self._observations.children(key))
            and not draining
        )
        names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in desired}
        kept = set() if finished else still_used(router, desired)
        for name, extra in list(self._observations.children(key).items()):
            if name not in names and extra.name not in kept and extra.owner_uid == router.uid:
                log.info("deleting %s %s/%s: no longer desired", name[0], router.namespace, name[1])
                await self._cluster.delete(BY_NAME[extra.kind], router.namespace, extra.name, extra.uid)
                self._applied.get(key, {}).pop(name, None)

    async def _apply(self, router: Router, manifest: Manifest, outcome: StatusInput) -> None:
        """Apply one child. An error that concerns only this child is recorded in the outcome.

        Raises ClusterError if it is transient, because the calls for the other children would fail as well.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        held = metadata["labels"][COMPONENT_LABEL] in (outcome.waiting_pool, *outcome.kept)
        try:
            if held and TEMPLATE_HASH in metadata.get("annotations", {}):
                manifest = await self._with_live_template(router, manifest)
            await self._apply_manifest(router, manifest)
        except NotInstalledError:
            message = f"{kind} is not installed in this cluster: install its CRD, or remove the field"
            if kind == "ServiceMonitor":
                outcome.unmonitored = message
            else:
                outcome.rejected.append(message)
        except RejectedError as error:
            outcome.rejected.append(f"{kind} {metadata['name']}: {error}")
        except ClusterError as error:
            if error.transient:
                raise
            outcome.failure = error

    async def _apply_manifest(self, router: Router, manifest: Manifest) -> None:
        """Apply one child, unless the same manifest was applied and its fields are still owned by the operator.

        Raises RejectedError if this DPSRouter does not own the live object, or if the API server rejects the manifest.
        """
        name = manifest["kind"], manifest["metadata"]["name"]
        applied = digest(manifest)
        cached = self._observations.children(router.key).get(name)
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

    async def _find(self, router: Router, manifest: Manifest) -> Child | None:
        """The live object, or None. Raises RejectedError if this DPSRouter does not own it."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = self._observations.children(router.key).get((kind, name))
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
        name, observed = manifest["metadata"]["name"], self._observations.children(router.key)
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

    async def _with_live_template(self, router: Router, manifest: Manifest) -> Manifest:
        """The Deployment with its live pod template.

        While a rollout is on hold, or the pool keeps its template after an upgrade of the operator, `replicas` is still
        updated and drift is still corrected outside the template.
        """
        metadata = manifest["metadata"]
        live = await self._cluster.get(kind_of(manifest), router.namespace, metadata["name"])
        recorded = live["metadata"].get("annotations", {})
        annotations = metadata["annotations"] | {name: recorded.get(name, "") for name in RECORDED}
        return manifest | {
            "metadata": metadata | {"annotations": annotations},
            "spec": manifest["spec"] | {"template": live["spec"]["template"]},
        }

    async def _update_status(self, key: Key, status: Manifest) -> None:
        """Apply the status if it differs, then create events for changed conditions."""
        (ready,) = [item for item in status["conditions"] if item["type"] == "Ready"]
        if ready["reason"] == "Suspended":
            READY.remove(*key)
        else:
            READY.labels(*key).set(ready["status"] == "True")
        failed = any(item["reason"] == "ProgressDeadlineExceeded" for item in status["conditions"])
        ROLLOUT_FAILED.labels(*key).set(failed)
        body = self._observations.routers.get(key)
        if body is None or body["status"] == status:
            return
        before = body["status"].get("conditions", [])
        try:
            live = await self._cluster.apply_status(key[0], key[1], status)
        except NotFoundError:
            # Its event may have been handled already, so nothing else would remove it from the cache.
            self._observations.update_router(body, deleted=True)
            if key not in self._observations.routers:
                await self._forget(key)
            return
        if live["metadata"]["uid"] != body["metadata"]["uid"]:
            return
        if key not in self._observations.routers:
            # It was deleted before the response arrived, which must not add it to the cache again.
            return
        self._observations.update_router(live)
        for event in events(body["metadata"], before, status["conditions"], self._now()):
            try:
                await self._cluster.create(event)
            except AlreadyExistsError:
                continue
