"""Volumes that several pods share, the volume for the engines' compile caches, and the limit of downloaded models."""

from collections.abc import Mapping
from typing import Final

from dps_engines.pools import PoolName
from dps_operator.api.pools import SpeculativePoolSpec
from dps_operator.api.spec import Spec
from dps_operator.api.types import plain_env
from dps_operator.api.volumes import SharedClaim, SharedVolume
from dps_operator.builders.pool_engines import pool_of
from dps_operator.resources import Component, Manifest, Router, child, child_name

ENGINE_CACHE = "/engine-cache"
GIB: Final = 2**30
COPIES: Final = 2
"""Limit in multiples of the 16-bit weights: some repositories have the weights in two formats, or in 32 bits."""
OTHER_FILES_GIB: Final = 32
"""Room for tokenizers, partial downloads, and the cache of the Hub's client."""


def shared_claim(router: Router, component: Component, claim: SharedClaim | None) -> list[Manifest]:
    """The PersistentVolumeClaim of a component; empty if there is none to create."""
    if claim is None:
        return []
    spec: Manifest = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": claim.size}},
    }
    if claim.storage_class_name is not None:
        spec["storageClassName"] = claim.storage_class_name
    return [child(router, "v1", "PersistentVolumeClaim", component, spec=spec)]


def shared_volume(router: Router, component: Component, volume: SharedVolume) -> Manifest:
    """The source of a volume: a directory of the node, an existing claim, or otherwise the component's own claim."""
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path, "type": "DirectoryOrCreate"}}
    return {"persistentVolumeClaim": {"claimName": volume.existing_claim or child_name(router, component)}}


def engine_cache_claim(router: Router) -> list[Manifest]:
    """The PersistentVolumeClaim of the engines' compile caches; empty if there is none to create."""
    cache = router.spec.engine.cache
    return shared_claim(router, "engine-cache", cache.claim if cache else None)


def engine_cache_env(spec: Spec, variables: Mapping[str, str]) -> list[Manifest]:
    """The variables that make an engine use the volume. variables: folders in the volume, by name of the variable."""
    if spec.engine.cache is None:
        return []
    return plain_env({name: f"{ENGINE_CACHE}/{folder}" for name, folder in variables.items()})


def engine_cache(router: Router) -> Manifest:
    """What to merge into the pod spec of an engine for the volume; empty if there is none."""
    cache = router.spec.engine.cache
    if cache is None:
        return {}
    if cache.empty_dir is not None:
        limit = cache.empty_dir.size_limit
        source: Manifest = {"emptyDir": {"sizeLimit": limit} if limit else {}}
    else:
        source = shared_volume(router, "engine-cache", cache)
    mount = {"name": "engine-cache", "mountPath": ENGINE_CACHE}
    return {
        "containers": [{"name": "engine", "volumeMounts": [mount]}],
        "volumes": [{"name": "engine-cache", **source}],
    }


def download_limit(router: Router, name: PoolName) -> str | None:
    """The limit of a pod's directory for the models that a pool downloads, so that they cannot fill the node's disk.

    None if the size of a model is not known, because a pod that exceeds its limit is evicted. Sizes of adapters are
    never known.
    """
    spec, pool = router.spec, pool_of(router.spec, name)
    if spec.model.adapters:
        return None
    names = [spec.model.name]
    if isinstance(pool, SpeculativePoolSpec) and pool.speculation.draft_model is not None:
        names.append(pool.speculation.draft_model)
    known = router.sizes.known
    if any(model not in known for model in names):
        return None
    weights = sum(known[model].weights(1) for model in names)
    return f"{-(-COPIES * weights // GIB) + OTHER_FILES_GIB}Gi"
