"""All child objects of a DPSRouter."""

from dps_engines.pools import POOLS
from dps_operator.builders.calibration import calibration_cron_job
from dps_operator.builders.engine import engine_deployment, engine_service, models_claim
from dps_operator.builders.gateway import gateway_deployment, gateway_identity, gateway_services
from dps_operator.builders.gateway_config import gateway_config_map
from dps_operator.builders.monitoring import service_monitor
from dps_operator.builders.mooncake import mooncake_master
from dps_operator.builders.network import http_route, ingress, network_policies
from dps_operator.builders.prefix_cache import cache_claim
from dps_operator.builders.scaling import autoscalers, disruption_budgets
from dps_operator.builders.store import managed, redis_service, redis_stateful_set
from dps_operator.builders.volumes import engine_cache_claim
from dps_operator.resources import Manifest, Router
from dps_operator.settings import Settings


def children(
    router: Router, settings: Settings, store_revision: str, cache_revision: str = ""
) -> list[Manifest]:
    """All objects to apply, ordered so that an object follows the objects that it refers to.

    The Secret with random values is not included, because all DPSRouters of a namespace share it (`credentials`).
    store_revision, cache_revision: digests of the values of a managed Redis and of a common prefix cache, or empty if
    there are none. Raises SpecError if the spec is invalid.
    """
    store = managed(router)
    objects = [
        *gateway_identity(router),
        gateway_config_map(router),
        *models_claim(router),
        *cache_claim(router),
        *engine_cache_claim(router),
        *network_policies(router),
        *(engine_service(router, pool) for pool in POOLS),
        *gateway_services(router),
    ]
    if store is not None:
        objects += [redis_service(router), redis_stateful_set(router, settings, store, store_revision)]
    objects += mooncake_master(router, settings)
    objects += [engine_deployment(router, pool, settings, cache_revision) for pool in POOLS]
    objects.append(gateway_deployment(router, settings, store_revision))
    return [
        *objects,
        *calibration_cron_job(router, settings),
        *autoscalers(router),
        *disruption_budgets(router),
        *ingress(router),
        *http_route(router),
        *service_monitor(router),
    ]
