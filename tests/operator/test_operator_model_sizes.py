"""The sizes of models that the operator reads, in the command lines of engines and in the status."""

from dataclasses import replace
from typing import Any

import pytest

from dps_engines.models import MODELS, ModelFacts
from dps_operator.errors import UnreadableModelError
from dps_operator.model_sizes import HubModel, recorded_sizes
from dps_testkit.operator.harness import OperatorHarness
from dps_testkit.operator.routers import SMALLEST

SEVEN, SMALL = MODELS["Qwen/Qwen2.5-7B-Instruct"], MODELS["Qwen/Qwen2.5-1.5B-Instruct"]
TARGET, DRAFT = HubModel("org/target", "v2"), HubModel("org/draft")
SPECULATION = {"algorithm": "Standalone", "draftModel": DRAFT.name}
UNKNOWN: dict[str, Any] = {
    "model": {"name": TARGET.name, "revision": TARGET.revision},
    "engine": {"version": "0.5.8.post1"},
    "pools": {"speculative": {"speculation": SPECULATION}},
}
RECORDED = [
    {
        "name": "org/target",
        "revision": "v2",
        "parameters": SEVEN.parameters,
        "layers": 28,
        "heads": 28,
        "kvHeads": 4,
        "intermediateSize": 18944,
        "headSize": 128,
    },
    {
        "name": "org/draft",
        "parameters": SMALL.parameters,
        "layers": 28,
        "heads": 12,
        "kvHeads": 2,
        "intermediateSize": 8960,
        "headSize": 128,
    },
]
FITS = (
    "so it is assumed that the models fit into the GPUs, and the engines' own defaults limit their memory unless "
    "args do"
)


class Configurations:
    """Reads the sizes of models from a table, and records the requests."""

    def __init__(self, sizes: dict[HubModel, ModelFacts]) -> None:
        self.sizes = sizes
        self.requests: list[HubModel] = []

    async def size(self, model: HubModel) -> ModelFacts:
        self.requests.append(model)
        if model not in self.sizes:
            raise UnreadableModelError("status 401")
        return self.sizes[model]


def command(harness: OperatorHarness) -> list[str]:
    containers = harness.object("Deployment", "qwen-speculative")["spec"]["template"]["spec"]["containers"]
    result: list[str] = containers[0]["command"] + containers[0].get("args", [])
    return result


def versions(harness: OperatorHarness) -> dict[tuple[str, ...], str]:
    return {name: one["metadata"]["resourceVersion"] for name, one in harness.cluster.objects.items()}


async def test_memory_is_computed_from_sizes_that_were_read() -> None:
    read = Configurations({TARGET: SEVEN, DRAFT: SMALL})
    harness = OperatorHarness(UNKNOWN, read.size)
    await harness.reconcile()
    assert read.requests == [TARGET, DRAFT]
    assert command(harness)[-2:] == ["--mem-fraction-static", "0.59"]
    assert harness.condition("SpecValid")["message"] == "the spec is valid"
    assert harness.status()["models"] == RECORDED


async def test_sizes_in_the_status_are_used_after_a_restart_without_the_hub() -> None:
    harness = OperatorHarness(UNKNOWN, Configurations({TARGET: SEVEN, DRAFT: SMALL}).size)
    await harness.reconcile()
    before = versions(harness)
    read = Configurations({})
    harness.restart(model_size=read.size)
    await harness.reconcile()
    assert read.requests == []
    assert versions(harness) == before


async def test_status_of_an_older_operator_lacks_the_size_of_the_mlp() -> None:
    harness = OperatorHarness(UNKNOWN, Configurations({TARGET: SEVEN, DRAFT: SMALL}).size)
    await harness.reconcile()
    recorded: list[dict[str, Any]] = harness.status()["models"]
    old = {"models": [{k: v for k, v in one.items() if k != "intermediateSize"} for one in recorded]}
    sizes = recorded_sizes(old)
    assert sizes[TARGET] == replace(SEVEN, intermediate_size=None)


async def test_other_revision_is_read_again() -> None:
    read = Configurations({TARGET: SEVEN, DRAFT: SMALL, HubModel("org/target", "v3"): SMALL})
    harness = OperatorHarness(UNKNOWN, read.size)
    await harness.reconcile()
    harness.edit({**UNKNOWN, "model": {"name": "org/target", "revision": "v3"}})
    await harness.reconcile()
    assert read.requests == [TARGET, DRAFT, HubModel("org/target", "v3")]
    assert harness.status()["models"][0]["parameters"] == SMALL.parameters


async def test_unreadable_model_is_assumed_to_fit() -> None:
    read = Configurations({TARGET: SEVEN})
    harness = OperatorHarness(UNKNOWN, read.size)
    await harness.reconcile()
    assert harness.condition("SpecValid")["message"] == (
        f"the spec is valid; the size of org/draft (status 401) is not known, {FITS}"
    )
    assert "--mem-fraction-static" not in command(harness)
    assert harness.status()["models"] == RECORDED[:1]


async def test_model_that_does_not_fit_is_refused_with_the_sum() -> None:
    large = replace(SEVEN, parameters=70 * 10**9)
    harness = OperatorHarness(UNKNOWN, Configurations({TARGET: large, DRAFT: SMALL}).size)
    await harness.reconcile()
    condition = harness.condition("SpecValid")
    assert condition["status"] == "False"
    assert condition["message"].startswith(
        "spec.engine.tensorParallel: 130.4 GiB (org/target) + 2.9 GiB (draft org/draft) = 133.3 GiB per GPU do not "
        "fit into 80.0 GiB"
    )


NOT_READ: dict[str, dict[str, Any]] = {
    "models in the table": SMALLEST,
    "models in folders": {
        "model": {"name": "/models/target"},
        "pools": {"speculative": {"speculation": {**SPECULATION, "draftModel": "/models/draft"}}},
    },
    "models in buckets": {
        "model": {"name": "org/target", "source": {"s3": {"uri": "s3://bucket/target"}}},
        "pools": {
            "speculative": {
                "speculation": {**SPECULATION, "draftSource": {"s3": {"uri": "s3://bucket/draft"}}}
            }
        },
    },
    "GPUs whose memory is not known": {**UNKNOWN, "nodePool": {"profile": "None"}},
    "MIG profiles that the GPUs do not have": {**UNKNOWN, "nodePool": {"mig": {"profile": "7g.10gb"}}},
}


@pytest.mark.parametrize("spec", NOT_READ.values(), ids=NOT_READ.keys())
async def test_configurations_are_read_only_if_they_are_needed(spec: dict[str, Any]) -> None:
    read = Configurations({})
    harness = OperatorHarness(spec, read.size)
    await harness.reconcile()
    assert read.requests == []
    assert "models" not in harness.status()


async def test_status_that_is_not_understood_is_replaced() -> None:
    read = Configurations({TARGET: SEVEN, DRAFT: SMALL})
    harness = OperatorHarness(UNKNOWN, read.size)
    await harness.reconcile()
    harness.status()["models"] = [{"name": "org/target"}]
    await harness.reconcile()
    assert harness.status()["models"] == RECORDED
