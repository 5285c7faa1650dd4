"""The common prefix cache in the engines' pods."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_engines.pools import POOLS
from dps_operator.api import quantity_bytes
from dps_operator.build.engine import engine_deployment
from dps_operator.build.gateway import gateway_config
from dps_operator.errors import SpecError
from dps_testkit.operator.routers import PREFIX_CACHE, SETTINGS, SMALLEST, router
from tests.operator.objects import engine_container, engine_pod

NAMES = {"prefix-cache-plugin"}


def changed(**fields: Any) -> dict[str, Any]:
    """PREFIX_CACHE with other fields of `spec.prefixCache`."""
    return {**PREFIX_CACHE, "prefixCache": {**PREFIX_CACHE["prefixCache"], **fields}}


@pytest.mark.parametrize(
    ("engine", "memory"),
    [({}, "164034Mi"), ({"args": ["--hicache-size", "20"]}, "117377Mi")],
    ids=["copy of the KV cache", "size in the arguments"],
)
def test_copies_of_kv_are_added_to_the_default_memory_request(engine: dict[str, Any], memory: str) -> None:
    spec = {**PREFIX_CACHE, "engine": {**PREFIX_CACHE["engine"], **engine}}
    assert engine_container(spec)["resources"]["requests"]["memory"] == memory


NOT_SHARED: dict[str, dict[str, Any]] = {
    "mode Separate": changed(mode="Separate"),
    "default mode": {**PREFIX_CACHE, "prefixCache": {}},
    "unsupported version": {**PREFIX_CACHE, "engine": {"version": "0.5.24"}},
    "different arguments": {
        **PREFIX_CACHE,
        "pools": {**PREFIX_CACHE["pools"], "greedy": {"args": ["--dtype", "half"]}},
    },
}


@pytest.mark.parametrize("spec", NOT_SHARED.values(), ids=NOT_SHARED.keys())
def test_engines_that_do_not_share_pages_are_the_same_as_without_the_field(spec: dict[str, Any]) -> None:
    without = {name: value for name, value in spec.items() if name != "prefixCache"}
    for pool in POOLS:
        made = engine_deployment(router(spec), pool, SETTINGS)
        assert made["spec"] == engine_deployment(router(without), pool, SETTINGS)["spec"]


def test_gateway_takes_a_common_cache_into_account_only_if_the_engines_share_pages() -> None:
    assert gateway_config(router(PREFIX_CACHE))["routing"]["commonPrefixCache"] is True
    for spec in NOT_SHARED.values():
        assert "commonPrefixCache" not in gateway_config(router(spec))["routing"]


PYTHON_PATHS: dict[str, tuple[list[dict[str, str]], list[dict[str, str]], str]] = {
    "unset": ([], [], "/opt/dps-plugin"),
    "of both pools": ([{"name": "PYTHONPATH", "value": "/a"}], [], "/opt/dps-plugin:/a"),
    "of one pool": (
        [{"name": "PYTHONPATH", "value": "/a"}],
        [{"name": "PYTHONPATH", "value": "/b:/c"}],
        "/opt/dps-plugin:/b:/c",
    ),
}


@pytest.mark.parametrize(("both", "own", "expected"), PYTHON_PATHS.values(), ids=PYTHON_PATHS.keys())
def test_plugin_precedes_the_specs_own_python_path(
    both: list[dict[str, str]], own: list[dict[str, str]], expected: str
) -> None:
    spec = {
        **PREFIX_CACHE,
        "engine": {"version": "0.5.23", "env": both},
        "pools": {**PREFIX_CACHE["pools"], "greedy": {"env": own}},
    }
    assert [one for one in engine_container(spec)["env"] if one["name"] == "PYTHONPATH"] == [
        {"name": "PYTHONPATH", "value": expected}
    ]


def test_python_path_from_another_object_is_refused() -> None:
    source = {"configMapKeyRef": {"name": "paths", "key": "python"}}
    env = [{"name": "PYTHONPATH", "valueFrom": source}]
    spec = {**PREFIX_CACHE, "engine": {"version": "0.5.23", "env": env}}
    with pytest.raises(SpecError, match=r"PYTHONPATH must be set by value with spec\.prefixCache"):
        engine_pod(spec)


AUTH = {"gateway": {"auth": {"secretName": "keys"}}}
SHARING_TENANTS = {"gateway": {"auth": {"secretName": "keys", "isolateCache": False}}}


@pytest.mark.parametrize(
    ("spec", "installed"),
    [
        pytest.param({**SMALLEST, **AUTH}, True, id="tenants"),
        pytest.param(SMALLEST, False, id="no tenants"),
        pytest.param({**SMALLEST, **SHARING_TENANTS}, False, id="tenants share prefixes"),
        pytest.param(
            {**SMALLEST, **AUTH, "engine": {"version": "0.5.24"}}, False, id="version without the plugin"
        ),
        pytest.param(
            {**SMALLEST, **AUTH, "engine": {"runtime": "VLLM", "version": "0.33.0"}}, False, id="vLLM"
        ),
    ],
)
def test_engines_with_separate_caches_have_the_plugin_if_tenants_are_separated(
    spec: dict[str, Any], installed: bool
) -> None:
    found = engine_pod(spec)
    (engine,) = found["containers"]
    containers = [one["name"] for one in found.get("initContainers", [])]
    volumes = {one["name"] for one in found["volumes"]} & NAMES
    paths = [one for one in engine["env"] if one["name"] == "PYTHONPATH"]
    assert (containers, volumes, bool(paths)) == (
        (["prefix-cache-plugin"], {"prefix-cache-plugin"}, True) if installed else ([], set(), False)
    )
    assert not any("hicache" in argument for argument in engine["args"])


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        ("0", 0),
        ("12", 12),
        ("1500m", 1),
        ("1k", 1000),
        ("2M", 2 * 10**6),
        ("1.5Gi", 3 * 2**29),
        ("1Ti", 2**40),
        ("1E", 10**18),
    ],
)
def test_quantity_is_converted_to_bytes(quantity: str, expected: int) -> None:
    assert quantity_bytes(quantity) == expected


@given(st.integers(0, 2**40), st.sampled_from(["", "k", "Ki", "M", "Mi", "G", "Gi", "T", "Ti", "P", "Pi"]))
def test_quantity_is_proportional_to_its_number(number: int, unit: str) -> None:
    assert quantity_bytes(f"{number}{unit}") == number * quantity_bytes(f"1{unit}")
