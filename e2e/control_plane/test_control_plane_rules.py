"""Every validation rule of the CRD on a real API server: a violation is rejected with a helpful message."""

from typing import Any

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.errors import RefusedError
from e2e.cluster.routers import router
from e2e.control_plane.rule_cases import gateway, models, pools, prefix_cache
from e2e.control_plane.rule_cases.kinds import Accepted, Immutable, Refused

pytest_plugins = ["e2e.cluster.fixtures"]

REFUSED: Refused = {**pools.REFUSED, **models.REFUSED, **prefix_cache.REFUSED, **gateway.REFUSED}
ACCEPTED: Accepted = {**pools.ACCEPTED, **models.ACCEPTED, **prefix_cache.ACCEPTED, **gateway.ACCEPTED}
IMMUTABLE: Immutable = {**models.IMMUTABLE, **gateway.IMMUTABLE}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_violation_of_a_rule_is_rejected(kube: Kube, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(**change), dry_run=True)
    assert message in str(refused.value)


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_valid_object_is_accepted(kube: Kube, change: dict[str, Any]) -> None:
    kube.apply(router(**change), dry_run=True)


@pytest.mark.parametrize(("before", "after", "message"), IMMUTABLE.values(), ids=IMMUTABLE.keys())
def test_change_of_immutable_field_is_rejected(
    kube: Kube, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    kube.apply(router(**before))
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(**after), dry_run=True)
    assert message in str(refused.value)


def test_cache_can_grow(kube: Kube) -> None:
    kube.apply(router(model={"cache": {"size": "900Mi"}}))
    kube.apply(router(model={"cache": {"size": "1Gi"}}))


def test_omitted_field_stays_unset_so_that_its_alternative_can_be_set_later(kube: Kube) -> None:
    kube.apply(router())
    kube.apply(router(gateway={"autoscaling": {"maxReplicas": 5}}))


NAMES = {
    "q" * 51: "metadata.name must have at most 50 characters",
    "7b": "metadata.name must start with a letter",
    "qwen.7b": "metadata.name must start with a letter",
}


@pytest.mark.parametrize(("name", "message"), NAMES.items())
def test_name_invalid_for_children_is_rejected(kube: Kube, name: str, message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(name), dry_run=True)
    assert message in str(refused.value)


def test_defaults_are_stored_in_the_object(kube: Kube) -> None:
    kube.apply(router(routing={"thresholdTokens": None}), server_side=True)
    spec = kube.get("dpsrouter", "qwen")["spec"]
    assert spec["routing"] == {
        "policy": "DeltaPrefill",
        "sessionKeys": [],
        "sessionTTLSeconds": 3600,
        "thresholdTokens": None,
    }
    assert spec["nodePool"]["profile"] == "A100-80GB"


def test_scale_subresource_and_category_work(kube: Kube) -> None:
    kube.apply(router(gateway={"replicas": 2}))
    kube.kubectl("scale", "dps/qwen", "--replicas", "3")
    assert "qwen" in kube.kubectl("get", "inference")
    assert kube.get("dpsrouter", "qwen")["spec"]["gateway"]["replicas"] == 3
