"""Facts that two packages must state separately, because neither may import the other, agree."""

import re
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from dps_engines.launch import WITHOUT_DRAFT_MODEL, Algorithm
from dps_gateway.config import Limits, Timeouts
from dps_gateway.pool import Pool
from dps_gateway.routing.policies import POLICIES
from dps_gateway.session.identity import DEFAULT_SESSION_KEYS, FORBIDDEN_HEADERS, parse_session_key
from dps_gateway.upstream.exchange import SALT_HEADER
from dps_lab.calibrate.cli import command_line
from dps_lab.calibrate.search import OBJECTIVES
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.options import fleet_of
from dps_operator.api import Runtime
from dps_operator.build.calibration import calibration_cron_job
from dps_sglang import cache_salt
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router
from dps_testkit.paths import ROOT


def spec_schema(field: str) -> Any:
    crd = yaml.safe_load((ROOT / "manifests/crd.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][field]


def routing_schema() -> Any:
    return spec_schema("routing")


PASSED: list[tuple[str, type[BaseModel], str, Any]] = [
    (section, model, name, field)
    for section, model in (("limits", Limits), ("timeouts", Timeouts))
    for name, field in spec_schema("gateway")["properties"][section]["properties"].items()
] + [
    ("timeouts", Timeouts, "drainSeconds", spec_schema("gateway")["properties"]["drainSeconds"]),
]
"""The fields of spec.gateway that are keys of the gateway's configuration: section, its model, key and schema."""


@pytest.mark.parametrize(
    ("model", "name", "field"), [row[1:] for row in PASSED], ids=[f"{row[0]}.{row[2]}" for row in PASSED]
)
def test_crd_accepts_only_values_that_the_gateway_accepts(
    model: type[BaseModel], name: str, field: dict[str, Any]
) -> None:
    smallest, below = (0.001, 0) if "exclusiveMinimum" in field else (field["minimum"], field["minimum"] - 1)
    model.model_validate({name: smallest})
    model.model_validate({name: field["maximum"]})
    with pytest.raises(ValidationError):
        model.model_validate({name: below})


def test_crd_offers_the_policies_of_the_gateway() -> None:
    assert set(routing_schema()["properties"]["policy"]["enum"]) == set(POLICIES)


def test_crd_offers_the_objectives_and_the_hardware_of_a_calibration() -> None:
    calibration = routing_schema()["properties"]["calibration"]["properties"]
    assert set(calibration["objective"]["enum"]) == set(OBJECTIVES)
    assert set(calibration["hardware"]["enum"]) == set(HARDWARE)


SUPPORTED = [
    (runtime, algorithm)
    for runtime in get_args(Runtime)
    for algorithm in get_args(Algorithm)
    if (runtime, algorithm) != ("SGLang", "Suffix")
]


@pytest.mark.parametrize(("runtime", "algorithm"), SUPPORTED)
def test_dps_calibrate_accepts_the_arguments_of_the_calibration_job(runtime: str, algorithm: str) -> None:
    draft_model = {} if algorithm in WITHOUT_DRAFT_MODEL else {"draftModel": "draft"}
    spec = {
        **SMALLEST,
        "engine": {"runtime": runtime, "image": "registry/engine:v0.32.0"},
        "pools": {"speculative": {"speculation": {"algorithm": algorithm, **draft_model}}},
        "routing": {"calibration": {}},
    }
    (job,) = calibration_cron_job(router(spec), SETTINGS)
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    command, *arguments = container["args"]
    assert command == "calibrate"
    options = command_line().parse_args(arguments)
    assert fleet_of(options, dict.fromkeys(Pool, 1)).speculation.algorithm == algorithm.upper()


def test_crd_forbids_the_headers_that_the_gateway_forbids() -> None:
    rules = [rule["rule"] for rule in routing_schema()["x-kubernetes-validations"]]
    (rule,) = (rule for rule in rules if "sessionKeys" in rule)
    assert set(re.findall(r"'header:([a-z-]+)'", rule)) == FORBIDDEN_HEADERS


def test_crd_accepts_every_default_session_key() -> None:
    pattern = routing_schema()["properties"]["sessionKeys"]["items"]["pattern"]
    assert [key for key in DEFAULT_SESSION_KEYS if not re.fullmatch(pattern, key)] == []
    assert all(parse_session_key(key) for key in DEFAULT_SESSION_KEYS)


def test_gateway_and_plugin_use_the_same_header_for_the_cache_salt() -> None:
    assert SALT_HEADER == cache_salt.SALT_HEADER
