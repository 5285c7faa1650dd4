"""Reconciles one DPSRouter: applies the desired children, prunes the rest, and updates the status."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import Gauge

from dps_engines.pools import POOLS, PoolName
from dps_operator import conditions
from dps_operator.api.spec import parse
from dps_operator.builders.children import children
from dps_operator.builders.scaling import min_replicas
from dps_operator.calibration import applied, recommendation
from dps_operator.cluster import Cluster
from dps_operator.credentials import credentials, release
from dps_operator.errors import (
    AlreadyExistsError,
    ClusterError,
    NotFoundError,
    NotInstalledError,
    RejectedError,
    SpecError,
)
from dps_operator.events import events
from dps_operator.gpu_budget.allocation import Allocation, granted, with_replicas
from dps_operator.gpu_budget.balancer import Balance
from dps_operator.kinds import BY_NAME, kind_of
from dps_operator.observe import Child, ChildKey, Key, Observations, child
from dps_operator.prefix_cache.service import CacheService
from dps_operator.resources import (
    COMPONENT_LABEL,
    ENGINE,
    SPEC_HASH,
    TEMPLATE_HASH,
    Manifest,
    Router,
    child_name,
    digest,
)
from dps_operator.revisions import kept_pools, with_version
from dps_operator.rollout import held_back, pool_on_hold
from dps_operator.scale_to_zero.rules import pools_with_zero
from dps_operator.scale_to_zero.scaler import Sleep
from dps_operator.settings import Settings

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
HANDOVER = "dps-operator-handover"
"""Field manager that owns the field `replicas` until an autoscaler takes over the field."""

RECORDED = (TEMPLATE_HASH, SPEC_HASH, ENGINE)
"""Annotations of a Deployment that describe its pod template."""

log = logging.getLogger(__name__)


@dataclass
class _Outcome:
    """Results of a reconcile that the status reports."""

    invalid: list[str] = field(default_factory=list)
    unmonitored: str = ""
    failure: ClusterError | None = None
    waiting_pool: str | None = None
    kept: Sequence[PoolName] = ()


def image_volumes(manifest: Manifest) -> set[str]:
    """The names of a Deployment's image volumes, which the API server removes if their feature gate is disabled."""
    if manifest["kind"] != "Deployment":
        return set()
    volumes = manifest["spec"]["template"]["spec"].get("volumes", [])
    return {volume["name"] for volume in volumes if "image" in volume}


class Reconciler:
    """Reconciles DPSRouters from the cached observations.

    Level-based: the result does not depend on earlier events. `_applied` only avoids unnecessary applies.
    """

    def __init__(
        self,
        cluster: Cluster,
        observations: Observations,
        settings: Settings,
        now: Callable[[], str],
        balance: Balance | None = None,
        cache_service: Callable[[Key], CacheService | None] = lambda _: None,
        sleep: Sleep | None = None,
    ) -> None:
        self._cluster = cluster
        self._observations = observations
        self._settings = settings
        self._now = now
        self._balance = balance or Balance()
        self._sleep = sleep or Sleep()
        self._cache_service = cache_service
        self._applied: dict[tuple[str, ChildKey], tuple[str, str]] = {}
        """Maps the owner's UID and a child to two digests: of the last applied manifest, and of the fields that the
        operator owned after that."""

    async def reconcile(self, key: Key) -> None:
        """Reconcile one DPSRouter. Raises ClusterError if the reconcile has to be retried."""
        body = self._observations.routers.get(key)
        if body is None:
            self._observations.forget(key)
            self._balance.forget(key)
            self._sleep.forget(key)
            READY.remove(*key)
            ROLLOUT_FAILED.remove(*key)
            await release(self._cluster, key)
            return
        metadata, before = body["metadata"], body["status"]
        if metadata.get("deletionTimestamp"):
            return
        generation = metadata.get("generation", 1)
        try:
            spec = applied(parse(body["spec"]), before)
        except SpecError as error:
            await self._update_status(
                key, conditions.invalid_spec_status(str(error), before, generation, self._now())
            )
            return
        router = Router(key[0], key[1], metadata["uid"], generation, spec)
        router = replace(router, spec=with_version(spec, self._engines(router, key)))
        allocation = self._balance.allocation(key, spec, before)
        if allocation is not None:
            router = self._within_budget(router, key, allocation)
        asleep = [] if spec.suspend else self._sleep.asleep(key, spec, self._engines(router, key))
        outcome = self._unchanged(router) if spec.paused else await self._converge(router, key, asleep)
        observed = conditions.Observed(
            children=self._observations.children(key),
            pods=self._observations.pods(key),
            invalid="; ".join(outcome.invalid),
            unmonitored=outcome.unmonitored,
            failing=str(outcome.failure or ""),
            waiting_pool=outcome.waiting_pool,
            kept=outcome.kept,
            allocation=allocation,
            recommended=recommendation(spec, self._observations.pods(key), before),
            unmeasured=(self._sleep if pools_with_zero(spec) else self._balance).unmeasured.get(key),
            asleep=asleep,
            cache_service=self._cache_service(key),
        )
        await self._update_status(key, conditions.build_status(router, observed, before, self._now()))
        if outcome.failure is not None:
            raise outcome.failure

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
            outcome.invalid.append(str(error))
        return outcome

    async def _converge(self, router: Router, key: Key, asleep: Sequence[PoolName]) -> _Outcome:
        """Apply the children. asleep: the pools that are scaled to zero."""
        outcome = _Outcome()
        try:
            revisions = await credentials(self._cluster, router)
            desired = children(
                router, self._settings, revisions.get("redis", ""), revisions.get("prefix-cache", "")
            )
        except (SpecError, RejectedError) as error:
            outcome.invalid.append(str(error))
            return outcome
        except ClusterError as error:
            outcome.failure = error
            return outcome
        engines = self._engines(router, key)
        outcome.kept = kept_pools(router.spec, desired, engines)
        outcome.waiting_pool = pool_on_hold(desired, engines, outcome.kept)
        stopped = ["speculative"] if held_back(router.spec, engines) else asleep
        for manifest in desired:
            if (
                manifest["kind"] == "Deployment"
                and manifest["metadata"]["labels"][COMPONENT_LABEL] in stopped
            ):
                manifest["spec"]["replicas"] = 0
        for manifest in desired:
            held = manifest["metadata"]["labels"][COMPONENT_LABEL] in (outcome.waiting_pool, *outcome.kept)
            try:
                if held and TEMPLATE_HASH in manifest["metadata"].get("annotations", {}):
                    manifest = await self._with_live_template(router, manifest)
                await self._apply(router, key, manifest)
            except NotInstalledError:
                message = f"{manifest['kind']} is not installed in this cluster: install its CRD, or remove the field"
                if manifest["kind"] == "ServiceMonitor":
                    outcome.unmonitored = message
                else:
                    outcome.invalid.append(message)
            except RejectedError as error:
                outcome.invalid.append(f"{manifest['kind']} {manifest['metadata']['name']}: {error}")
            except ClusterError as error:
                outcome.failure = error
                if error.transient:
                    return outcome
        try:
            await self._prune(router, key, desired)
        except ClusterError as error:
            outcome.failure = error
        return outcome

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
        known = self._observations.children(key)
        names = {pool: ("Deployment", child_name(router, pool)) for pool in POOLS}
        return {
            pool: known[name]
            for pool, name in names.items()
            if name in known and known[name].owner_uid == router.uid
        }

    async def _find(self, router: Router, key: Key, manifest: Manifest) -> Child | None:
        """The live object, or None. Raises RejectedError if this DPSRouter does not own it."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = self._observations.children(key).get((kind, name))
        if found is None:
            try:
                found = child(await self._cluster.get(kind_of(manifest), router.namespace, name))
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

    async def _apply(self, router: Router, key: Key, manifest: Manifest) -> None:
        """Apply one child, unless the same manifest was applied and its fields are still owned by the operator."""
        name = manifest["kind"], manifest["metadata"]["name"]
        applied = digest(manifest)
        cached = self._observations.children(key).get(name)
        if cached is not None and self._applied.get((router.uid, name)) == (applied, cached.owned):
            return
        found = await self._find(router, key, manifest)
        if found is not None and found.owns_replicas and "replicas" not in manifest["spec"]:
            await self._hand_over_replicas(router, manifest, found)
        try:
            live = await self._cluster.apply(manifest)
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
        self._applied[router.uid, name] = applied, child(live).owned

    async def _hand_over_replicas(self, router: Router, manifest: Manifest, found: Child) -> None:
        """Transfer ownership of `replicas` to a second field manager before the operator stops applying the field.

        Server-side apply would otherwise reset the field to its default. A pool that was suspended starts with the
        minimum, because an autoscaler does not scale up a Deployment without replicas.
        """
        if found.replicas is None:
            return
        component = manifest["metadata"]["labels"][COMPONENT_LABEL]
        keep = {key: manifest[key] for key in ("apiVersion", "kind")} | {
            "metadata": {key: manifest["metadata"][key] for key in ("name", "namespace")},
            "spec": {"replicas": found.replicas.desired or min_replicas(router, component)},
        }
        await self._cluster.apply(keep, manager=HANDOVER)

    async def _prune(self, router: Router, key: Key, desired: list[Manifest]) -> None:
        """Delete children that are no longer desired."""
        names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in desired}
        for name, extra in list(self._observations.children(key).items()):
            if name not in names and extra.owner_uid == router.uid:
                log.info("deleting %s %s/%s: no longer desired", name[0], router.namespace, name[1])
                await self._cluster.delete(BY_NAME[extra.kind], router.namespace, extra.name, extra.uid)
                self._applied.pop((router.uid, name), None)

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
            return
        if live["metadata"]["uid"] != body["metadata"]["uid"]:
            return
        self._observations.update_router(live)
        for event in events(body["metadata"], before, status["conditions"], self._now()):
            try:
                await self._cluster.create(event)
            except AlreadyExistsError:
                continue
