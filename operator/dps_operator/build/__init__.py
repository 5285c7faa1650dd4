"""Builds all child objects of a DPSRouter. This package performs no I/O."""

from dps_engines.pools import POOLS
from dps_operator.build.calibration import calibration_cron_job
from dps_operator.build.engine import engine_claims, engine_deployment, engine_service
from dps_operator.build.gateway import (
    gateway_config_map,
    gateway_deployment,
    gateway_identity,
    gateway_services,
)
from dps_operator.build.network import http_route, ingress, network_policies, service_monitor
from dps_operator.build.prefix_cache import mooncake_master
from dps_operator.build.redis import managed_redis
from dps_operator.build.scaling import autoscalers, disruption_budgets
from dps_operator.effective import Router
from dps_operator.objects import Manifest
from dps_operator.settings import Settings


def children(router: Router, settings: Settings, store_revision: str) -> list[Manifest]:
    """All objects to apply, ordered so that an object follows the objects that it refers to.

    The Secret with random values is not included, because all DPSRouters of a namespace share it (`credentials`).
    store_revision: digest of the values of a managed Redis, or empty if there is none. Raises SpecError if the spec is
    invalid.
    """
    return [
        *gateway_identity(router),
        gateway_config_map(router),
        *engine_claims(router),
        *network_policies(router),
        *(engine_service(router, pool) for pool in POOLS),
        *gateway_services(router),
        *managed_redis(router, settings, store_revision),
        *mooncake_master(router, settings),
        *(engine_deployment(router, pool, settings) for pool in POOLS),
        gateway_deployment(router, settings, store_revision),
        *calibration_cron_job(router, settings),
        *autoscalers(router),
        *disruption_budgets(router),
        *ingress(router),
        *http_route(router),
        *service_monitor(router),
    ]
