"""Reconciles one DPSRouter: applies the desired children, prunes the rest, and updates the status."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import Gauge

from dps_engines.models import ModelFacts
from dps_engines.pools import POOLS, PoolName
from dps_operator.api.spec import Spec, parse
from dps_operator.apply import Applier
from dps_operator.builders.children import children
from dps_operator.builders.launch import knows_gpus
from dps_operator.calibration import applied, recommendation
from dps_operator.cluster import Cluster
from dps_operator.credentials import ensure, release, withdraw
from dps_operator.errors import (
    AlreadyExistsError,
    ClusterError,
    NotFoundError,
    NotInstalledError,
    RejectedError,
    SpecError,
    UnreadableModelError,
)
from dps_operator.gpu_budget.allocation import Allocation, calibrated_ratio, granted, with_replicas
from dps_operator.gpu_budget.balancer import Allocations
from dps_operator.kinds import kind_of
from dps_operator.model_sizes import HubModel, ModelSizes, models_to_read, recorded_sizes
from dps_operator.observe import Child, Key, Observations
from dps_operator.prefix_cache.health import CacheHealth
from dps_operator.resources import (
    COMPONENT_LABEL,
    ENGINE,
    SPEC_HASH,
    TEMPLATE_HASH,
    Manifest,
    Router,
    engine_key,
)
from dps_operator.revisions import kept_pools, with_version
from dps_operator.rollout import pool_on_hold, rolled_out, still_used
from dps_operator.scale_to_zero.rules import pools_with_zero
from dps_operator.scale_to_zero.scaler import IdlePools
from dps_operator.settings import Settings
from dps_operator.status.build import build_status, invalid_spec_status
from dps_operator.status.events import events
from dps_operator.status.observed import Observed

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
ReadSize = Callable[[HubModel], Awaitable[ModelFacts]]
"""Reads the sizes of a model; raises UnreadableModelError."""
RECORDED = (TEMPLATE_HASH, SPEC_HASH, ENGINE)
"""Annotations of a Deployment that describe its pod template."""


@dataclass
class _Outcome:
    """Results of a reconcile that the status reports."""

    invalid: str = ""
    rejected: list[str] = field(default_factory=list)
    unmonitored: str = ""
    failure: ClusterError | None = None
    waiting_pool: PoolName | None = None
    kept: Sequence[PoolName] = ()


class Reconciler:
    """Reconciles DPSRouters from the cached observations. Level-based: the result does not depend on earlier events."""

    def __init__(
        self,
        cluster: Cluster,
        observations: Observations,
        settings: Settings,
        now: Callable[[], str],
        allocations: Allocations | None = None,
        cache_health: Callable[[Key], CacheHealth | None] = lambda _: None,
        idle_pools: IdlePools | None = None,
        model_size: ReadSize | None = None,
    ) -> None:
        self._cluster = cluster
        self._observations = observations
        self._settings = settings
        self._now = now
        self._allocations = allocations or Allocations()
        self._idle_pools = idle_pools or IdlePools()
        self._cache_health = cache_health
        self._model_size = model_size
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
        generation = metadata.get("generation", 1)
        try:
            spec = applied(parse(body["spec"]), before)
        except SpecError as error:
            await self._update_status(key, invalid_spec_status(str(error), before, generation, self._now()))
            return
        sizes = await self._sizes(spec, before)
        router = Router(key[0], key[1], metadata["uid"], generation, spec, sizes)
        router = replace(router, spec=with_version(spec, self._engines(router, key)))
        allocation = self._allocations.allocation(key, spec, before)
        if allocation is not None:
            router = self._within_budget(router, key, allocation)
        scaled_to_zero = (
            [] if spec.suspend else self._idle_pools.scaled_to_zero(key, spec, self._engines(router, key))
        )
        outcome = (
            self._unchanged(router) if spec.paused else await self._converge(router, key, scaled_to_zero)
        )
        for name, engine in self._engines(router, key).items():
            if engine.replicas is not None:
                REPLICAS.labels(*key, name).set(engine.replicas.desired)
        observed = Observed(
            children=self._observations.children(key),
            pods=self._observations.pods(key),
            invalid=outcome.invalid,
            rejected="; ".join(outcome.rejected),
            unmonitored=outcome.unmonitored,
            failing=str(outcome.failure or ""),
            waiting_pool=outcome.waiting_pool,
            kept=outcome.kept,
            allocation=allocation,
            load_ratio=calibrated_ratio(spec, before),
            recommended=recommendation(spec, self._observations.pods(key), before),
            unmeasured=(self._idle_pools if pools_with_zero(spec) else self._allocations).unmeasured.get(key),
            scaled_to_zero=scaled_to_zero,
            cache_health=self._cache_health(key),
        )
        await self._update_status(key, build_status(router, observed, before, self._now()))
        if outcome.failure is not None:
            raise outcome.failure

    async def _sizes(self, spec: Spec, before: Mapping[str, Any]) -> ModelSizes:
        """The sizes of models that are recorded in the status, or else can be read now."""
        read, unreadable = {}, {}
        recorded = recorded_sizes(before)
        for model in models_to_read(spec) if knows_gpus(spec) else ():
            if model in recorded:
                read[model] = recorded[model]
            elif self._model_size is not None:
                try:
                    read[model] = await self._model_size(model)
                except UnreadableModelError as error:
                    unreadable[model.name] = str(error)
        return ModelSizes(read, unreadable)

    async def _forget(self, key: Key) -> None:
        """Remove what is known of a deleted DPSRouter. Its children are garbage-collected."""
        self._observations.forget(key)
        self._applier.forget(key)
        self._allocations.forget(key)
        self._idle_pools.forget(key)
        READY.remove(*key)
        ROLLOUT_FAILED.remove(*key)
        for pool in POOLS:
            REPLICAS.remove(*key, pool)
        await release(self._cluster, key)

    def _within_budget(self, router: Router, key: Key, allocation: Allocation) -> Router:
        """The DPSRouter with the replicas that may be requested now."""
        engines = self._engines(router, key)
        live = {name: found.replicas.desired for name, found in engines.items() if found.replicas}
        pods = Counter(pod.component for pod in self._observations.pods(key))
        return replace(router, spec=with_replicas(router.spec, granted(allocation, live, pods)))

    def _unchanged(self, router: Router) -> _Outcome:
        """The outcome for a paused DPSRouter: nothing is applied, but an invalid spec is reported."""
        outcome = _Outcome()
        try:
            children(router, self._settings, "")
        except SpecError as error:
            outcome.invalid = str(error)
        return outcome

    async def _converge(self, router: Router, key: Key, scaled_to_zero: Sequence[PoolName]) -> _Outcome:
        """Apply the desired children and delete the others."""
        outcome = _Outcome()
        try:
            credentials = await ensure(self._cluster, router)
            revisions = credentials.revisions
            desired = children(
                router, self._settings, revisions.get("redis", ""), revisions.get("prefix-cache", "")
            )
        except (SpecError, RejectedError) as error:
            outcome.invalid = str(error)
            return outcome
        except ClusterError as error:
            outcome.failure = error
            return outcome
        engines = self._engines(router, key)
        outcome.kept = kept_pools(router.spec, desired, engines)
        outcome.waiting_pool = pool_on_hold(desired, engines, outcome.kept)
        _stop(desired, scaled_to_zero)
        try:
            for manifest in desired:
                await self._apply(router, manifest, outcome)
            await self._remove(router, key, desired, credentials.unneeded, outcome)
        except ClusterError as error:
            outcome.failure = error
        return outcome

    async def _remove(
        self,
        router: Router,
        key: Key,
        desired: Sequence[Manifest],
        unneeded: Collection[str],
        outcome: _Outcome,
    ) -> None:
        """Delete the children that are no longer desired, and their credentials. Raises ClusterError.

        Pods of an older template serve until they have been replaced, and may have to be restarted. So what they use is
        deleted only after that, and a rollout that cannot succeed can be reverted. A Deployment does not count pods
        that are terminating, although they complete their requests.
        """
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
        if finished:
            await withdraw(self._cluster, router, unneeded)

    async def _apply(self, router: Router, manifest: Manifest, outcome: _Outcome) -> None:
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

    def _engines(self, router: Router, key: Key) -> dict[str, Child]:
        """The live Deployments of the engines, by pool."""
        known = self._observations.children(key)
        names = {pool: engine_key(router.name, pool) for pool in POOLS}
        return {
            pool: known[name]
            for pool, name in names.items()
            if name in known and known[name].owner_uid == router.uid
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


def _stop(desired: Sequence[Manifest], pools: Collection[str]) -> None:
    """Set the replicas of the Deployments of these pools to zero."""
    for manifest in desired:
        if manifest["kind"] == "Deployment" and manifest["metadata"]["labels"][COMPONENT_LABEL] in pools:
            manifest["spec"]["replicas"] = 0
