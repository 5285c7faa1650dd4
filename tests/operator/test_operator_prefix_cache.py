"""The common prefix cache in the engines' pods."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dps_engines.pools import POOLS
from dps_operator.api.types import quantity_bytes
from dps_operator.builders.children import children
from dps_operator.builders.engine import engine_deployment
from dps_operator.builders.prefix_cache import SECRET_REVISION
from dps_operator.errors import SpecError
from dps_operator.resources import Manifest
from dps_sglang.install import install
from dps_testkit.operator.routers import PREFIX_CACHE, SETTINGS, SMALLEST, router

NAMES = {"prefix-cache", "prefix-cache-plugin", "prefix-cache-secret"}


def changed(**fields: Any) -> dict[str, Any]:
    """PREFIX_CACHE with other fields of `spec.prefixCache`."""
    return {**PREFIX_CACHE, "prefixCache": {**PREFIX_CACHE["prefixCache"], **fields}}


def pod(spec: dict[str, Any]) -> Manifest:
    """The pod spec of the greedy engines."""
    found: Manifest = engine_deployment(router(spec), "greedy", SETTINGS, "uid")["spec"]["template"]["spec"]
    return found


def volume(spec: dict[str, Any]) -> Manifest:
    """The volume that holds the pages."""
    (found,) = [one for one in pod(spec)["volumes"] if one["name"] == "prefix-cache"]
    return {key: value for key, value in found.items() if key != "name"}


@pytest.mark.parametrize(
    ("engine", "memory"),
    [({}, "98498Mi"), ({"args": ["--hicache-size", "20"]}, "51841Mi")],
    ids=["copy of the KV cache", "size in the arguments"],
)
def test_copies_of_kv_are_added_to_the_default_memory_request(engine: dict[str, Any], memory: str) -> None:
    spec = {**PREFIX_CACHE, "engine": {**PREFIX_CACHE["engine"], **engine}}
    assert pod(spec)["containers"][0]["resources"]["requests"]["memory"] == memory


VOLUMES: dict[str, tuple[dict[str, Any], Manifest]] = {
    "new claim": ({"claim": {"size": "1Ti"}}, {"persistentVolumeClaim": {"claimName": "qwen-prefix-cache"}}),
    "existing claim": ({"existingClaim": "kv"}, {"persistentVolumeClaim": {"claimName": "kv"}}),
    "directory of the node": (
        {"hostPath": "/mnt/kv"},
        {"hostPath": {"path": "/mnt/kv", "type": "DirectoryOrCreate"}},
    ),
}


@pytest.mark.parametrize(("file", "expected"), VOLUMES.values(), ids=VOLUMES.keys())
def test_pages_are_stored_in_the_volume_of_the_spec(file: dict[str, Any], expected: Manifest) -> None:
    assert volume(changed(file=file)) == expected


@pytest.mark.parametrize("file", [{"existingClaim": "kv"}, {"hostPath": "/mnt/kv"}])
def test_claim_is_created_only_if_the_spec_requests_one(file: dict[str, Any]) -> None:
    made = children(router(changed(file=file)), SETTINGS, "", "uid")
    assert not [one for one in made if one["kind"] == "PersistentVolumeClaim"]


NOT_SHARED: dict[str, dict[str, Any]] = {
    "mode Separate": changed(mode="Separate"),
    "default mode": {**PREFIX_CACHE, "prefixCache": {}},
    "unsupported version": {**PREFIX_CACHE, "engine": {"version": "0.5.22"}},
    "different arguments": {
        **PREFIX_CACHE,
        "pools": {**PREFIX_CACHE["pools"], "greedy": {"args": ["--dtype", "half"]}},
    },
}


@pytest.mark.parametrize("spec", NOT_SHARED.values(), ids=NOT_SHARED.keys())
def test_engines_that_do_not_share_pages_are_the_same_as_without_the_field(spec: dict[str, Any]) -> None:
    without = {name: value for name, value in spec.items() if name != "prefixCache"}
    for pool in POOLS:
        made = engine_deployment(router(spec), pool, SETTINGS, "uid")
        assert made["spec"] == engine_deployment(router(without), pool, SETTINGS)["spec"]


def routing(spec: dict[str, Any]) -> Any:
    """The section `routing` of the gateway's configuration."""
    (config,) = (
        one["data"]["config.yaml"]
        for one in children(router(spec), SETTINGS, "", "uid")
        if one["kind"] == "ConfigMap" and "config.yaml" in one.get("data", {})
    )
    return yaml.safe_load(config)["routing"]


def test_gateway_takes_a_common_cache_into_account_only_if_the_engines_share_pages() -> None:
    assert routing(PREFIX_CACHE)["commonPrefixCache"] is True
    for spec in NOT_SHARED.values():
        assert "commonPrefixCache" not in routing(spec)


PYTHON_PATHS: dict[str, tuple[list[dict[str, str]], list[dict[str, str]], str]] = {
    "unset": ([], [], "/opt/dps-plugin"),
    "of both pools": ([{"name": "PYTHONPATH", "value": "/a"}], [], "/opt/dps-plugin:/a"),
    "of one pool": (
        [{"name": "PYTHONPATH", "value": "/a"}],
        [{"name": "PYTHONPATH", "value": "/b:/c"}],
        "/opt/dps-plugin:/b:/c",
    ),
    "empty": ([{"name": "PYTHONPATH"}], [], "/opt/dps-plugin"),
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
    (engine,) = pod(spec)["containers"]
    assert [one for one in engine["env"] if one["name"] == "PYTHONPATH"] == [
        {"name": "PYTHONPATH", "value": expected}
    ]


def test_python_path_from_another_object_is_refused() -> None:
    source = {"configMapKeyRef": {"name": "paths", "key": "python"}}
    env = [{"name": "PYTHONPATH", "valueFrom": source}]
    spec = {**PREFIX_CACHE, "engine": {"version": "0.5.23", "env": env}}
    with pytest.raises(SpecError, match=r"PYTHONPATH must be set by value with spec\.prefixCache"):
        pod(spec)


@pytest.mark.parametrize("flag", ["--page-size", "--tokenizer-worker-num"])
def test_arguments_that_the_common_cache_sets_are_refused(flag: str) -> None:
    spec = {**PREFIX_CACHE, "engine": {"version": "0.5.23", "args": [flag, "4"]}}
    with pytest.raises(
        SpecError, match=rf"^spec\.engine\.args: {flag} is set by spec\.prefixCache; remove it$"
    ):
        pod(spec)


AUTH = {"gateway": {"auth": {"secretName": "keys"}}}
SHARING_TENANTS = {"gateway": {"auth": {"secretName": "keys", "isolateCache": False}}}


@pytest.mark.parametrize(
    ("spec", "installed"),
    [
        pytest.param({**SMALLEST, **AUTH}, True, id="tenants"),
        pytest.param(SMALLEST, False, id="no tenants"),
        pytest.param({**SMALLEST, **SHARING_TENANTS}, False, id="tenants share prefixes"),
        pytest.param(
            {**SMALLEST, **AUTH, "engine": {"version": "0.5.22"}}, False, id="version without the plugin"
        ),
        pytest.param(
            {**SMALLEST, **AUTH, "engine": {"runtime": "VLLM", "version": "0.12.0"}}, False, id="vLLM"
        ),
    ],
)
def test_engines_with_separate_caches_have_the_plugin_if_tenants_are_separated(
    spec: dict[str, Any], installed: bool
) -> None:
    found = pod(spec)
    (engine,) = found["containers"]
    containers = [one["name"] for one in found.get("initContainers", [])]
    volumes = {one["name"] for one in found["volumes"]} & NAMES
    paths = [one for one in engine["env"] if one["name"] == "PYTHONPATH"]
    assert (containers, volumes, bool(paths)) == (
        (["prefix-cache-plugin"], {"prefix-cache-plugin"}, True) if installed else ([], set(), False)
    )
    assert not any("hicache" in argument for argument in engine["args"])


def test_revision_of_the_secret_is_in_the_pod_template() -> None:
    template = engine_deployment(router(PREFIX_CACHE), "greedy", SETTINGS, "uid")["spec"]["template"]
    assert template["metadata"]["annotations"] == {SECRET_REVISION: "uid"}


def test_command_of_the_init_container_is_that_of_the_plugins_installer() -> None:
    (container,) = pod(PREFIX_CACHE)["initContainers"]
    assert container["command"][:3] == ["python3", "-m", install.__module__]


def test_pod_template_can_change_the_init_container() -> None:
    own = {"name": "prefix-cache-plugin", "image": "mirror/operator:1"}
    pools = {**PREFIX_CACHE["pools"], "greedy": {"podTemplate": {"spec": {"initContainers": [own]}}}}
    (container,) = pod({**PREFIX_CACHE, "pools": pools})["initContainers"]
    assert container["image"] == "mirror/operator:1"
    assert container["command"][0] == "python3"


def test_common_cache_adds_only_its_own_volumes_and_mounts() -> None:
    with_cache, without = pod(PREFIX_CACHE), pod({**SMALLEST, "engine": {"version": "0.5.23"}})
    assert {one["name"] for one in with_cache["volumes"]} - {
        one["name"] for one in without["volumes"]
    } == NAMES
    mounts = {one["name"]: one.get("readOnly", False) for one in with_cache["containers"][0]["volumeMounts"]}
    assert mounts == {
        "models": False,
        "shm": False,
        "prefix-cache": False,
        "prefix-cache-plugin": True,
        "prefix-cache-secret": True,
    }


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
