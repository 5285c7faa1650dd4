"""The session store: its options, and the separation of routers that share one."""

from typing import Any

import pytest

from dps_operator.build import children
from dps_operator.errors import SpecError
from dps_operator.objects import Manifest
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router

EXTERNAL = {"urlSecretRef": {"name": "sessions", "key": "url"}}


def redis_pod(**managed: Any) -> Manifest:
    made = children(router({**SMALLEST, "sessionStore": {"managed": managed}}), SETTINGS, "uid")
    (found,) = [one for one in made if one["kind"] == "StatefulSet"]
    result: Manifest = found["spec"]["template"]["spec"]
    return result


def test_managed_store_has_the_resources_placement_and_pull_secrets_of_the_spec() -> None:
    template = {"spec": {"nodeSelector": {"disk": "ssd"}, "imagePullSecrets": [{"name": "mirror"}]}}
    pod = redis_pod(image="valkey/valkey:8", resources={"limits": {"memory": "2Gi"}}, podTemplate=template)
    (container,) = pod["containers"]
    assert (pod["nodeSelector"], pod["imagePullSecrets"]) == ({"disk": "ssd"}, [{"name": "mirror"}])
    assert container["image"] == "valkey/valkey:8"
    assert container["resources"] == {
        "requests": {"cpu": "100m", "memory": "512Mi"},
        "limits": {"memory": "2Gi"},
    }


@pytest.mark.parametrize(
    ("size", "limit", "data"),
    [
        ("10Gi", None, "384mb"),
        ("10Gi", "2Gi", "1536mb"),
        ("10Gi", 1000000000, "715mb"),
        ("1Gi", "4Gi", "512mb"),
        (2 * 10**9, "4Gi", "953mb"),
        ("1Mi", "4Gi", "1mb"),
    ],
)
def test_redis_uses_three_quarters_of_its_memory_limit_and_at_most_half_of_its_volume_for_data(
    size: Any, limit: Any, data: str
) -> None:
    resources = {"resources": {"limits": {"memory": limit}}} if limit else {}
    arguments = redis_pod(size=size, **resources)["containers"][0]["args"]
    assert arguments[arguments.index("--maxmemory") + 1] == data


def test_name_of_more_than_46_characters_requires_an_external_redis() -> None:
    """The StatefulSet controller could not create the pod, because the value of one of its labels would be too long."""
    children(router(SMALLEST, "q" * 46), SETTINGS, "uid")
    with pytest.raises(
        SpecError, match="a managed Redis requires a DPSRouter whose name has at most 46 characters"
    ):
        children(router(SMALLEST, "q" * 47), SETTINGS, "uid")
    children(router({**SMALLEST, "sessionStore": EXTERNAL}, "q" * 50), SETTINGS, "uid")
