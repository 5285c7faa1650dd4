"""The API key of the engines, and TLS on the gateway's port for clients."""

from typing import Any

import pytest

from dps_engines.pools import POOLS
from dps_gateway.config import GatewayConfig
from dps_operator.build.gateway import gateway_config, gateway_services
from dps_operator.objects import Manifest
from dps_testkit.engine_options import check_accepted, recorded_options
from dps_testkit.operator.routers import SMALLEST, VLLM, router
from tests.operator.objects import engine_container, gateway_pod

KEY = {"name": "engines", "key": "api-key"}
FROM_SECRET = {"valueFrom": {"secretKeyRef": KEY}}


def with_key(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "engine": {**spec.get("engine", {}), "apiKeySecretRef": KEY}}


def file(pod: Manifest, path: str) -> tuple[str, str]:
    """The Secret and the key of which a container of the pod has a file at `path`."""
    folder, _, name = path.rpartition("/")
    (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == folder]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    secret = volume["secret"]
    keys = {item["path"]: item["key"] for item in secret.get("items", [])}
    return secret["secretName"], keys.get(name, name)


@pytest.mark.parametrize("pool", POOLS)
def test_sglang_receives_its_key_by_a_variable_in_its_command_line(pool: str) -> None:
    container = engine_container(with_key({**SMALLEST, "engine": {"version": "0.5.23"}}), pool)
    assert {"name": "DPS_ENGINE_API_KEY", **FROM_SECRET} in container["env"]
    flag = container["args"].index("--api-key")
    assert container["args"][flag + 1] == "$(DPS_ENGINE_API_KEY)"
    check_accepted(recorded_options("sglang", "0.5.23"), container["args"])


@pytest.mark.parametrize("pool", POOLS)
def test_vllm_reads_its_key_from_its_own_variable(pool: str) -> None:
    container = engine_container(with_key(VLLM), pool)
    assert {"name": "VLLM_API_KEY", **FROM_SECRET} in container["env"]
    assert "--api-key" not in container["args"]


def test_gateway_sends_the_key_to_both_pools() -> None:
    made = with_key(SMALLEST)
    config = gateway_config(router(made))
    GatewayConfig.model_validate(config)
    files = {config["pools"][pool]["apiKeyFile"] for pool in POOLS}
    assert [file(gateway_pod(made), path) for path in files] == [("engines", "api-key")]


def test_gateway_serves_https_with_the_certificate_of_the_secret() -> None:
    made = {**SMALLEST, "gateway": {"tls": {"secretName": "certificate"}}}
    config = gateway_config(router(made))
    GatewayConfig.model_validate(config)
    files = config["listen"]["tls"]
    pod = gateway_pod(made)
    assert file(pod, files["certFile"]) == ("certificate", "tls.crt")
    assert file(pod, files["keyFile"]) == ("certificate", "tls.key")
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["port"] == "admin", "probes need no certificate"


def test_service_of_a_gateway_with_tls_states_https() -> None:
    made = router({**SMALLEST, "gateway": {"tls": {"secretName": "certificate"}}})
    (port,) = gateway_services(made)[0]["spec"]["ports"]
    assert port["appProtocol"] == "https"
