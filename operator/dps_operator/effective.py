"""The effective spec: what a DPSRouter is at present, from its spec, its recorded status and what is observed.

`effective_router` is the only place where defaults, calibrations, recorded versions and the operator's own scaling are
combined. Builders and conditions read only its result, which nothing changes afterwards. This module performs no I/O.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic import ValidationError

from dps_engines import launch
from dps_engines.launch import Unshareable
from dps_engines.pools import POOLS, PoolName
from dps_engines.registry import RUNTIMES
from dps_engines.runtime import EngineRuntime
from dps_operator import api
from dps_operator.api import Allocation
from dps_operator.errors import SpecError
from dps_operator.objects import MODELS, Key, Manifest, Owner, child_name
from dps_operator.observe import Child, Observations, Pod

STARTUP_PROBE_PERIOD: Final = 10
"""Seconds between two probes of an engine that is loading its model, unless podTemplate sets another period."""
MOUNTS: Final = "/mnt"
"""Where containers mount models from volumes and images."""
RESOLVED: Final = frozenset({"replicas", "scaling", "autoscaling", "strategy", "runtime", "image", "version"})
"""Fields of a pool on which its pod template does not depend, or depends through its engine."""
WITHIN_CAPACITY: Final = api.PoolStrategy(max_surge=0, max_unavailable=1)
"""The default strategy of a pool without a GPU for an additional engine during a rollout."""

Role = Literal["model", "draft"]


@dataclass(frozen=True)
class EffectivePool:
    """One pool of engines."""

    name: PoolName
    spec: api.PoolSpec
    """The pool's part of the spec, with the strategy that applies. What follows takes precedence over it."""
    engine: api.Engine
    """`spec.engine` with the pool's own runtime, image and version, and with the version that the engines keep."""
    runtime: EngineRuntime
    version: str
    own_engine: bool
    """Whether the pool has another runtime, image or version than `spec.engine`."""
    speculation: api.Speculation | None
    """None for the greedy pool."""
    replicas: int | None
    """What the Deployment requests; None if another controller determines it."""
    min_replicas: int
    """The minimum number of replicas while the pool serves; 1 for a pool that is scaled externally."""
    scaled_to_zero: bool
    """Whether the pool is idle, and the operator has stopped its engines."""

    @property
    def image(self) -> str:
        """The image of the engines."""
        return self.runtime.image(self.engine.image, self.engine.version)

    @property
    def load_seconds(self) -> int:
        """Seconds that an engine may take to load: the runtime's, unless podTemplate has other numbers."""
        containers = (self.spec.pod_template.spec or {}).get("containers") or []
        engine: dict[str, Any] = next((one for one in containers if one.get("name") == "engine"), {})
        probe, usual = engine.get("startupProbe") or {}, self.runtime.load_seconds
        period = probe.get("periodSeconds", STARTUP_PROBE_PERIOD)
        failures = probe.get("failureThreshold", usual // STARTUP_PROBE_PERIOD)
        # The API server refuses other values.
        return period * failures if isinstance(period, int) and isinstance(failures, int) else usual

    @property
    def has_autoscaler(self) -> bool:
        """Whether a HorizontalPodAutoscaler scales the pool. A pool of at most one replica needs none."""
        scaling = self.spec.autoscaling
        return scaling is not None and (scaling.min_replicas > 0 or scaling.max_replicas > 1)

    @property
    def idle_seconds(self) -> int | None:
        """The time without a request after which the pool is scaled to zero; None if it never is."""
        scaling = self.spec.autoscaling
        return scaling.idle_seconds if scaling is not None and scaling.min_replicas == 0 else None

    @property
    def all_args(self) -> list[str]:
        """The additional arguments of the engines: those of `spec.engine`, then the pool's."""
        return [*self.engine.args, *self.spec.args]

    @property
    def all_env(self) -> list[api.EnvVar]:
        """The environment variables of the spec: those of `spec.engine`, then the pool's, which override them."""
        return [*self.engine.env, *self.spec.env]

    @property
    def draft_source(self) -> api.ModelSource | None:
        """The source of the draft model; None if there is none, or if it is on the Hub."""
        return self.speculation.draft_source if self.speculation else None

    @property
    def template_fields(self) -> dict[str, Any]:
        """The pool's fields of the spec on which its pod template depends, as JSON and without defaults."""
        return self.spec.model_dump(mode="json", exclude_defaults=True, exclude=set(RESOLVED))


@dataclass(frozen=True)
class Router(Owner):
    """A DPSRouter with a valid spec, and what is to be deployed for it."""

    generation: int
    spec: api.Spec
    """With the version that the engines keep, and with the policy and the threshold of the last calibration if they are
    to be applied. What follows takes precedence over its pools, its prefix cache and its managed Redis."""
    pools: Mapping[PoolName, EffectivePool]
    gateway_replicas: int
    """The number of gateways, or the minimum if an autoscaler determines it."""
    recommended: api.RecommendedRouting | None
    """The result of the last calibration that has found one; None without calibrations."""
    load_ratio: float | None
    """The calibrated ratio of the pools' loads that the GPU budget keeps; None if they are kept equal."""
    redis: api.ManagedStore | None
    """The managed Redis; None if the store is external."""
    unshareable: Unshareable | None
    """Why the pools cannot share the common prefix cache of the spec; None if they can, or if the spec has none."""
    shared_cache: api.PrefixCache | None
    """The prefix cache that the engines share; None if they share none."""
    mooncake_master: api.MooncakeMaster | None
    """The Mooncake master that the operator deploys; None if there is none, or if the engines share no pages."""
    allocation: Allocation | None
    """How the pools share the GPU budget; None without one."""

    @property
    def speculation(self) -> api.Speculation:
        """The speculative decoding of the speculative pool."""
        found = self.pools["speculative"].speculation
        assert found is not None
        return found

    @property
    def tokenizer_source(self) -> api.ModelSource | None:
        """The source that contains the gateway's tokenizer; None if it is on the Hub or the cache volume."""
        return self.spec.model.source if self.spec.model.tokenizer is None else None

    @property
    def scaled_to_zero(self) -> list[PoolName]:
        """The idle pools whose engines the operator has stopped."""
        return [name for name, pool in self.pools.items() if pool.scaled_to_zero]

    @property
    def may_scale_to_zero(self) -> bool:
        """Whether a pool is scaled to zero while it is idle."""
        return any(pool.idle_seconds is not None for pool in self.pools.values())


def live_engines(observations: Observations, owner: Owner) -> dict[str, Child]:
    """The live Deployments of the engines of a DPSRouter, by pool."""
    children = observations.children(owner.key)
    found = {pool: children.get(("Deployment", child_name(owner, pool))) for pool in POOLS}
    return {
        pool: child for pool, child in found.items() if child is not None and child.owner_uid == owner.uid
    }


def effective_router(body: Manifest, observations: Observations) -> Router:
    """A cached DPSRouter with its effective spec. Raises SpecError if the spec is invalid."""
    metadata, status = body["metadata"], body["status"]
    owner, spec = Owner(metadata["namespace"], metadata["name"], metadata["uid"]), api.parse(body["spec"])
    engines, pods = live_engines(observations, owner), observations.pods(owner.key)
    idle = observations.idle.get(owner.key, {})
    engine = _with_version(
        spec.engine, [child for name, child in engines.items() if not _has_own_engine(_declared(spec, name))]
    )
    allocation = _allocation(spec, observations.allocations.get(owner.key), status)
    allowed = _replicas_allowed_now(allocation, engines, pods) if allocation is not None else {}
    pools = {
        name: _pool(spec, engine, name, engines.get(name), allowed.get(name), idle.get(name))
        for name in POOLS
    }
    calibration, recorded = spec.routing.calibration, _recommended(spec, (), status)
    to_apply = recorded if calibration is not None and calibration.apply else None
    cache = spec.prefix_cache if spec.prefix_cache and spec.prefix_cache.mode == "Common" else None
    unshareable = _unshareable(spec, pools) if cache is not None else None
    shared = cache if unshareable is None else None
    master = None
    if shared is not None and shared.mooncake is not None and shared.mooncake.external_master is None:
        master = shared.mooncake.master or api.MooncakeMaster()
    store, gateway = spec.session_store, spec.gateway
    gateways = gateway.autoscaling.min_replicas if gateway.autoscaling else gateway.replicas
    return Router(
        owner.namespace,
        owner.name,
        owner.uid,
        metadata.get("generation", 1),
        spec.model_copy(update={"engine": engine, "routing": _routing(spec.routing, to_apply)}),
        pools=pools,
        gateway_replicas=gateways or api.DEFAULT_GATEWAY_REPLICAS,
        recommended=_recommended(spec, pods, status),
        load_ratio=_load_ratio(to_apply, allocation),
        redis=None if store.url_secret_ref is not None else store.managed or api.ManagedStore(),
        unshareable=unshareable,
        shared_cache=shared,
        mooncake_master=master,
        allocation=allocation,
    )


def effective_routers(
    observations: Observations, uses: Callable[[Mapping[str, Any]], bool]
) -> dict[Key, Router]:
    """The DPSRouters that use a feature. Invalid specs are left out; the reconciler reports them.

    uses: whether a spec uses the feature, decided before it is parsed, so that only the specs of these are parsed.
    """
    found = {}
    for key, body in observations.routers.items():
        if uses(body["spec"]):
            with suppress(SpecError):
                found[key] = effective_router(body, observations)
    return found


def _declared(spec: api.Spec, name: str) -> api.PoolSpec:
    return spec.pools.speculative if name == "speculative" else spec.pools.greedy


def _has_own_engine(pool: api.PoolSpec) -> bool:
    return any(value is not None for value in (pool.runtime, pool.image, pool.version))


def _pool(
    spec: api.Spec,
    engine: api.Engine,
    name: PoolName,
    live: Child | None,
    budget: int | None,
    idle: bool | None,
) -> EffectivePool:
    """One pool.

    engine: that of the pools without an engine of their own. live: the pool's Deployment. budget: the replicas that the
    GPU budget allows now; None without one. idle: what the autoscaler has decided; None if it has not.
    """
    pool = _declared(spec, name)
    if own := _has_own_engine(pool):
        change = {"runtime": pool.runtime or engine.runtime, "image": pool.image, "version": pool.version}
        engine = _with_version(engine.model_copy(update=change), [live] if live else [])
    runtime = RUNTIMES[engine.runtime]
    scaling, replicas = pool.autoscaling, pool.replicas if budget is None else budget
    if pool.strategy == api.PoolStrategy() and (budget is not None or spec.placement == "SharedGPU"):
        pool = pool.model_copy(update={"strategy": WITHIN_CAPACITY})
    scaled_to_zero = False
    if scaling is not None and scaling.min_replicas == 0 and not spec.suspend:
        # A restart of the operator does not change the replicas of a pool.
        scaled_to_zero = live is not None and live.replicas.desired == 0 if idle is None else idle
    result = EffectivePool(
        name=name,
        spec=pool,
        engine=engine,
        runtime=runtime,
        version=runtime.version(engine.image, engine.version),
        own_engine=own,
        speculation=pool.speculation if isinstance(pool, api.SpeculativePoolSpec) else None,
        replicas=replicas or 1,
        min_replicas=(scaling.min_replicas if scaling else replicas) or 1,
        scaled_to_zero=scaled_to_zero,
    )
    if spec.suspend or scaled_to_zero:
        return replace(result, replicas=0)
    return replace(result, replicas=None) if pool.scaling == "External" or result.has_autoscaler else result


def _with_version(engine: api.Engine, deployments: Sequence[Child]) -> api.Engine:
    """The engine with a version, if it has neither a version nor an image.

    That of the live Deployments that run the engine, or the default if there are none or if upgrades are automatic.
    """
    if engine.version is not None or engine.image is not None:
        return engine
    recorded = [deployment.engine.split() for deployment in deployments]
    in_use = [words[1] for words in recorded if len(words) == 2 and words[0] == engine.runtime]
    keep = in_use and engine.upgrade_policy == "Manual"
    version = in_use[0] if keep else RUNTIMES[engine.runtime].version(None, None)
    return engine.model_copy(update={"version": version})


def _allocation(spec: api.Spec, newer: Allocation | None, status: Mapping[str, Any]) -> Allocation | None:
    """The newest allocation of the GPU budget, scaled if the budget has changed since; None without a budget.

    Without an earlier one, the pools have the same number of replicas, and an odd one is speculative.
    """
    if spec.gpu_budget is None:
        return None
    total = spec.gpu_budget.gpus // spec.engine.tensor_parallel
    known = api.to_wire(newer) if newer is not None else status.get("gpuBudget", {})
    speculative, greedy = known.get("speculativeReplicas", 1), known.get("greedyReplicas", 1)
    if speculative + greedy != total:
        share = -(-total * speculative // (speculative + greedy))
        speculative = min(max(share, 1), total - 1)
    return Allocation(
        speculative_replicas=speculative,
        greedy_replicas=total - speculative,
        last_move_time=known.get("lastMoveTime"),
    )


def _replicas_allowed_now(
    allocation: Allocation, engines: Mapping[str, Child], pods: Sequence[Pod]
) -> dict[PoolName, int]:
    """The replicas to request now. A pool grows only when the other pool's pods have released their GPUs.

    Otherwise the new pod would be pending, for which a cluster autoscaler would add a node. Pods that are terminating
    count.
    """
    counts, existing = allocation.counts, Counter(pod.component for pod in pods)
    total = sum(counts.values())
    result = {}
    for pool, other in (POOLS, POOLS[::-1]):
        engine = engines.get(pool)
        desired = engine.replicas.desired if engine else 0
        result[pool] = min(counts[pool], max(desired, total - existing[other], 1))
    return result


def _recommended(
    spec: api.Spec, pods: Sequence[Pod], status: Mapping[str, Any]
) -> api.RecommendedRouting | None:
    """The result of the newest calibration that has found one, in the pods or in the status.

    None if there is no such result, or if the spec has no calibration.
    """
    if spec.routing.calibration is None:
        return None
    found = [pod.calibrated.found for pod in pods if pod.calibrated is not None and pod.calibrated.found]
    with suppress(ValidationError):
        found.insert(0, api.RecommendedRouting.model_validate(status.get("routing", {}).get("recommended")))
    return max(found, key=lambda each: each.time, default=None)


def _routing(routing: api.Routing, recommended: api.RecommendedRouting | None) -> api.Routing:
    """The routing with the recommendation that is to be applied, if there is one."""
    if recommended is None:
        return routing
    change: dict[str, Any] = {"policy": recommended.policy}
    if recommended.threshold_tokens is not None:
        change["threshold_tokens"] = recommended.threshold_tokens
    return routing.model_copy(update=change)


def _load_ratio(recommended: api.RecommendedRouting | None, allocation: Allocation | None) -> float | None:
    """The calibrated load ratio; None if it is not to be applied, or is for another budget."""
    found = recommended.gpu_budget if recommended is not None else None
    total = sum(allocation.counts.values()) if allocation is not None else 0
    if found is None or found.speculative_replicas + found.greedy_replicas != total:
        return None
    return found.load_ratio


def _unshareable(spec: api.Spec, pools: Mapping[PoolName, EffectivePool]) -> Unshareable | None:
    """Why the pools cannot share a common prefix cache; None if they can."""
    if spec.model.adapters:
        return Unshareable(
            "LoRAEnabled", "engines with LoRA adapters share no KV; remove spec.model.adapters"
        )
    arguments = {name: pool.all_args for name, pool in pools.items()}
    speculation = launch_speculation(spec.pools.speculative.speculation)
    found = [pool.runtime.unshareable(pool.version, speculation, arguments) for pool in pools.values()]
    return next(filter(None, found), None)


def launch_speculation(speculation: api.Speculation) -> launch.Speculation:
    """The settings of the engine's command line. Raises SpecError if a value is outside its limits."""
    fields = speculation.model_dump(exclude={"draft_source"})
    return launch.Speculation(**fields, draft_path=model_path(speculation.draft_source, "draft", MODELS))


def model_path(source: api.ModelSource | None, role: Role, folder: str) -> str | None:
    """The path of a model in a container; None for a model on the Hub.

    folder: where the volume is mounted to which models are downloaded.
    """
    if source is None:
        return None
    mounted = source.pvc or source.oci
    if mounted is not None:
        return f"{MOUNTS}/{role}/{mounted.path or ''}".rstrip("/")
    return f"{folder}/{bucket_of(source).uri.replace('://', '/', 1)}".rstrip("/")


def bucket_of(source: api.ModelSource) -> api.S3Source | api.GSSource:
    """The bucket of a source that is downloaded. Raises SpecError if the source has none."""
    bucket = source.s3 or source.gs
    if bucket is None:
        raise SpecError("spec.model.source: set exactly one of pvc, s3, gs and oci")
    return bucket
