"""Reconciles one DPSRouter: applies the desired children, prunes the rest, and updates the status."""

from collections.abc import Callable, Sequence

from prometheus_client import Gauge

from dps_engines.pools import POOLS
from dps_operator.apply import Applier
from dps_operator.build import children
from dps_operator.cache_health import CacheHealth
from dps_operator.conditions import StatusInput
from dps_operator.credentials import ensure_credentials, forget_router
from dps_operator.effective import Router, effective_router, live_engines
from dps_operator.errors import (
    AlreadyExistsError,
    ClusterError,
    NotFoundError,
    NotInstalledError,
    RejectedError,
    SpecError,
)
from dps_operator.kube import Cluster
from dps_operator.objects import COMPONENT_LABEL, ENGINE, SPEC_HASH, TEMPLATE_HASH, Key, Manifest, kind_of
from dps_operator.observe import Observations
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


class Reconciler:
    """Reconciles DPSRouters from the cached observations. Level-based: the result does not depend on earlier events."""

    def __init__(
        self,
        cluster: Cluster,
        observations: Observations,
        settings: Settings,
        now: Callable[[], str],
    ) -> None:
        self._cluster = cluster
        self._observations = observations
        self._settings = settings
        self._now = now
        self._applier = Applier(cluster, observations)

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
        self._applier.forget(key)
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
        await self._applier.prune(router, desired, () if finished else still_used(router, desired))

    async def _apply(self, router: Router, manifest: Manifest, outcome: StatusInput) -> None:
        """Apply one child. An error that concerns only this child is recorded in the outcome.

        Raises ClusterError if it is transient, because the calls for the other children would fail as well.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        held = metadata["labels"][COMPONENT_LABEL] in (outcome.waiting_pool, *outcome.kept)
        try:
            if held and TEMPLATE_HASH in metadata.get("annotations", {}):
                manifest = await self._with_live_template(router, manifest)
            await self._applier.apply(router, manifest)
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
