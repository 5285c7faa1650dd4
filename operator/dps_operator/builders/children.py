"""All child objects of a DPSRouter."""

from dps_engines.pools import POOLS
from dps_operator.builders.engine import engine_deployment, engine_service, models_claim
from dps_operator.builders.gateway import (
    gateway_config_map,
    gateway_deployment,
    gateway_identity,
    gateway_services,
)
from dps_operator.builders.monitoring import service_monitor
from dps_operator.builders.network import http_route, ingress, network_policies
from dps_operator.builders.scaling import autoscalers, disruption_budgets
from dps_operator.builders.store import managed, redis_service, redis_stateful_set
from dps_operator.resources import Manifest, Router
from dps_operator.settings import Settings


def children(router: Router, settings: Settings, store_revision: str) -> list[Manifest]:
    """All objects to apply, ordered so that an object follows the objects that it refers to.

    The Secret of a managed Redis is not included, because it is created once (`store.redis_secret`).
    store_revision: UID of that Secret, or empty if the store is not managed. Raises SpecError if the spec is
    invalid.
    """
    store = managed(router)
    objects = [
        *gateway_identity(router),
        gateway_config_map(router),
        *models_claim(router),
        *network_policies(router),
        *(engine_service(router, pool) for pool in POOLS),
        *gateway_services(router),
    ]
    if store is not None:
        objects += [redis_service(router), redis_stateful_set(router, settings, store, store_revision)]
    objects += [engine_deployment(router, pool) for pool in POOLS]
    objects.append(gateway_deployment(router, settings, store_revision))
    return [
        *objects,
        *autoscalers(router),
        *disruption_budgets(router),
        *ingress(router),
        *http_route(router),
        *service_monitor(router),
    ]
