"""Every setting of the gateway can be set in a DPSRouter, is derived by the operator, or has a reason why not."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from dps_gateway.config import GatewayConfig
from dps_operator.api.gateway import GatewayLimits, GatewayTimeouts
from dps_operator.builders.gateway_config import gateway_config
from dps_testkit.operator.routers import EVERYTHING, PREFIX_CACHE, SMALLEST, router


def values_for(model: type[BaseModel]) -> dict[str, int]:
    """A value for each field of a model of numbers."""
    return {field.alias or name: 7 for name, field in model.model_fields.items()}


SECRET: Final = {"name": "secret", "key": "key"}
SPECS: Final[tuple[dict[str, Any], ...]] = (
    EVERYTHING,
    {**PREFIX_CACHE, "suspend": True},
    {
        **SMALLEST,
        "model": {"name": "m", "revision": "v2"},
        "engine": {"apiKeySecretRef": SECRET},
        "sessionStore": {"urlSecretRef": SECRET},
        "gateway": {
            "workers": 2,
            "tls": {"secretName": "tls"},
            "modelAliases": ["gpt-4o"],
            "strictModel": False,
            "limits": values_for(GatewayLimits),
            "timeouts": values_for(GatewayTimeouts),
        },
    },
)
"""DPSRouters that together have every setting."""

NEITHER: Final = {
    "listen.adminHost": "probes and peers need the admin port on the address of the pod, which is the default",
    "pools.*.endpoints": "the engines are found by their Service",
    "pools.*.caFile": "engine pods serve HTTP",
    "session.redisUrl": "it contains a password and comes from the environment variable DPS_REDIS_URL",
    "session.peers.endpoints": "the replicas are found by their Service",
}
"""Settings that no DPSRouter has, and why."""


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The paths of all settings, with `*` for the name of a pool."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested = [
            each
            for each in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(each, type) and issubclass(each, BaseModel)
        ]
        if nested:
            yield from settings(nested[0], f"{path}.")
        else:
            yield path


def pooled(path: str) -> str:
    """A path with `*` for the name of a pool."""
    return path.replace("pools.speculative.", "pools.*.").replace("pools.greedy.", "pools.*.")


def given(config: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    """The paths of the settings in a configuration."""
    for name, value in config.items():
        path = pooled(f"{prefix}{name}")
        if isinstance(value, dict) and path not in known:
            yield from given(value, known, f"{prefix}{name}.")
        else:
            yield path


def test_every_gateway_setting_is_in_a_dpsrouter_or_has_a_reason_why_not() -> None:
    known = {pooled(path) for path in settings(GatewayConfig)}
    found = {path for spec in SPECS for path in given(gateway_config(router(spec)), known)}
    assert found <= known
    assert known - found == NEITHER.keys()
