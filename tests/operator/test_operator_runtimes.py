"""The runtime, image and version of each pool's engines."""

from typing import Any

import pytest

from dps_engines.pools import PoolName
from dps_operator.build.engine import engine_deployment, engine_service
from dps_operator.build.gateway import gateway_config
from dps_operator.build.launch import engine_arguments
from dps_operator.build.network import network_policies
from dps_operator.errors import SpecError
from dps_operator.objects import ENGINE
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router
from tests.operator.harness import serving
from tests.operator.objects import engine_container

OWN: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    "default": ({}, {}, ("lmsysorg/sglang:v0.5.23", "SGLang 0.5.23")),
    "runtime of both pools": (
        {"runtime": "VLLM"},
        {},
        ("vllm/vllm-openai:v0.32.0", "VLLM 0.32.0"),
    ),
    "runtime of one pool": (
        {"image": "registry/sglang:v0.5.23"},
        {"runtime": "VLLM"},
        ("vllm/vllm-openai:v0.32.0", "VLLM 0.32.0"),
    ),
    "version of one pool": (
        {"image": "registry/sglang:v0.5.24"},
        {"version": "0.5.23"},
        ("lmsysorg/sglang:v0.5.23", "SGLang 0.5.23"),
    ),
}


def with_greedy(engine: dict[str, Any], greedy: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A spec with these settings of `engine` and of the greedy pool. Its speculative pool uses n-grams."""
    pools = {"speculative": {"speculation": {"algorithm": "Ngram"}}, "greedy": greedy}
    return {**SMALLEST, "engine": engine, "pools": pools, **fields}


@pytest.mark.parametrize(("engine", "greedy", "wanted"), OWN.values(), ids=OWN.keys())
def test_settings_of_a_pool_replace_those_of_the_engine(
    engine: dict[str, Any], greedy: dict[str, Any], wanted: tuple[str, str]
) -> None:
    made = engine_deployment(router(with_greedy(engine, greedy)), "greedy", SETTINGS)
    image = made["spec"]["template"]["spec"]["containers"][0]["image"]
    assert (image, made["metadata"]["annotations"][ENGINE]) == wanted


MIXED = with_greedy({}, {"runtime": "VLLM", "args": ["--max-model-len", "8192"]}, networkPolicy={})


def test_every_object_of_a_pool_has_the_port_of_its_runtime() -> None:
    mixed = router(MIXED)
    services = gateway_config(mixed)["pools"].values()
    assert [one["service"]["port"] for one in services] == [30000, 8000]
    ports: dict[PoolName, int] = {"speculative": 30000, "greedy": 8000}
    for name, port in ports.items():
        assert engine_container(MIXED, name)["ports"][0]["containerPort"] == port
        assert engine_service(mixed, name)["spec"]["ports"][0]["port"] == port
        (policy,) = [one for one in network_policies(mixed) if one["metadata"]["name"] == f"qwen-{name}"]
        assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port}]


@pytest.mark.parametrize(
    ("env", "value"), [([], "1"), ([{"name": "VLLM_NO_USAGE_STATS", "value": "0"}], "0")]
)
def test_vllm_sends_no_usage_statistics_unless_the_spec_asks_for_them(
    env: list[dict[str, str]], value: str
) -> None:
    container = engine_container(with_greedy({"runtime": "VLLM", "env": env}, {}))
    (variable,) = [one for one in container["env"] if one["name"] == "VLLM_NO_USAGE_STATS"]
    assert variable["value"] == value


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "arguments for two runtimes": (
        with_greedy({"args": ["--log-level", "info"]}, {"runtime": "VLLM"}),
        "spec.engine.args: the runtimes of the pools differ, and so do their arguments; use spec.pools.*.args",
    ),
    "old version of a pool": (
        with_greedy({}, {"runtime": "VLLM", "version": "0.11.0"}),
        "spec.pools.greedy: vLLM 0.11.0 is not supported; use 0.32.0 or newer",
    ),
}


@pytest.mark.parametrize(("spec", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_combination_that_does_not_exist_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        engine_arguments(router(spec), "greedy")
    assert str(refused.value) == message


async def test_version_in_use_is_kept_for_the_runtime_of_one_pool() -> None:
    harness = await serving(with_greedy({}, {"runtime": "VLLM"}))
    harness.object("Deployment", "qwen-greedy")["metadata"]["annotations"][ENGINE] = "VLLM 0.34.0"
    harness.edit(with_greedy({}, {"runtime": "VLLM"}, nodePool={"profile": "None"}))
    await harness.reconcile()
    harness.available("qwen-speculative")
    await harness.reconcile()
    container = harness.object("Deployment", "qwen-greedy")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "vllm/vllm-openai:v0.34.0"


async def test_change_of_the_runtime_takes_its_default_version() -> None:
    harness = await serving(with_greedy({}, {}))
    harness.edit(with_greedy({}, {"runtime": "VLLM"}))
    await harness.reconcile()
    pod = harness.object("Deployment", "qwen-greedy")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "vllm/vllm-openai:v0.32.0"
