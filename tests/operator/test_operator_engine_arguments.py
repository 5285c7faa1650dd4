"""The command line of a pool, derived from the spec."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from dps_engines import launch
from dps_engines.pools import POOLS
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.memory import limits_memory
from dps_operator.api.model import Engine
from dps_operator.api.pools import Speculation
from dps_operator.api.spec import parse
from dps_operator.builders.launch import engine_arguments
from dps_operator.errors import SpecError
from dps_testkit.operator.routers import EVERYTHING, SMALLEST, router
from dps_testkit.paths import ROOT

EXAMPLES = sorted((ROOT / "manifests/examples").glob("*.yaml"))
ADAPTERS = [{"name": "sql", "path": "org/sql"}]


def test_engines_of_both_pools_load_the_adapters() -> None:
    pools = {"speculative": {"speculation": {"algorithm": "Ngram"}}}
    made = router({"model": {**SMALLEST["model"], "adapters": ADAPTERS}, "pools": pools})
    for pool in POOLS:
        line = engine_arguments(made, pool)
        assert line[line.index("--lora-paths") + 1] == "sql=org/sql"


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"model": {**SMALLEST["model"], "adapters": ADAPTERS}}, "spec.model.adapters"),
        ({"engine": {"args": ["--enable-lora"]}}, "--enable-lora"),
    ],
)
def test_adapters_are_refused_with_a_draft_model(changed: dict[str, Any], cause: str) -> None:
    with pytest.raises(SpecError, match=f"supports no LoRA adapters with Standalone; .*, or remove {cause}$"):
        engine_arguments(router({**SMALLEST, **changed}), "speculative")


def test_spec_is_mapped_to_the_engines_command_line() -> None:
    line = engine_arguments(router(EVERYTHING), "speculative")
    assert line == [
        *("--model-path", "meta-llama/Llama-3.1-8B-Instruct"),
        *("--served-model-name", "llama"),
        *("--host", "0.0.0.0"),
        *("--port", "30000"),
        *("--tp-size", "2"),
        "--enable-metrics",
        "--enable-cache-report",
        "--enable-trace",
        *("--otlp-traces-endpoint", "collector:4317"),
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", "head"),
        *("--speculative-num-steps", "5"),
        *("--speculative-eagle-topk", "4"),
        *("--speculative-num-draft-tokens", "16"),
        *("--mem-fraction-static", "0.85"),
    ]


def test_speculation_of_the_api_and_of_the_engines_have_the_same_fields() -> None:
    of_the_engine = {field.name for field in fields(launch.Speculation)}
    assert set(Speculation.model_fields) - {"draft_source"} == of_the_engine - {"draft_path"}


def test_every_runtime_of_the_api_is_implemented() -> None:
    assert set(get_args(Engine.model_fields["runtime"].annotation)) == set(RUNTIMES)


def test_arguments_of_the_engine_precede_those_of_the_pool() -> None:
    pools = {**SMALLEST["pools"], "greedy": {"args": ["--log-level", "debug"]}}
    made = router({**SMALLEST, "engine": {"args": ["--log-level", "info"]}, "pools": pools})
    assert engine_arguments(made, "greedy")[-4:] == ["--log-level", "info", "--log-level", "debug"]


def test_speculative_arguments_are_refused_for_the_greedy_pool() -> None:
    # Any flag --speculative-* serves as the example, provided that no field of the API sets it.
    made = router({**SMALLEST, "engine": {"args": ["--speculative-attention-mode", "decode"]}})
    engine_arguments(made, "speculative")
    with pytest.raises(SpecError, match="and only for the speculative pool"):
        engine_arguments(made, "greedy")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine": {"args": ["--port", "1"]}}, "spec.engine.args: --port is set by the operator; remove it"),
        (
            {"pools": {**SMALLEST["pools"], "greedy": {"args": ["--tp=2"]}}},
            "spec.pools.greedy.args: --tp is set by spec.engine.tensorParallel; remove it",
        ),
        (
            {"engine": {"args": ["--api-key", "x"]}},
            "spec.engine.args: --api-key is not supported: the gateway does not know this key, so an engine with "
            "this flag would answer every request with 401; in a DPSRouter, set spec.engine.apiKeySecretRef; "
            "remove it",
        ),
        (
            {"engine": {"version": "0.4.9"}},
            "spec.engine: SGLang 0.4.9 is not supported; use 0.5.8 or newer",
        ),
    ],
)
def test_refused_engine_is_reported_with_its_field(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        engine_arguments(router({**SMALLEST, **changed}), "greedy")
    assert str(refused.value) == message


def test_tokenizer_and_revision_are_passed_to_the_engine() -> None:
    model = {**SMALLEST["model"], "tokenizer": "org/tokenizer", "revision": "v2"}
    line = engine_arguments(router({**SMALLEST, "model": model}), "greedy")
    assert line[line.index("--tokenizer-path") :][:4] == [
        "--tokenizer-path",
        "org/tokenizer",
        "--revision",
        "v2",
    ]


def test_memory_of_the_default_pair_is_left_to_the_default_version() -> None:
    assert "--mem-fraction-static" not in engine_arguments(router(SMALLEST), "speculative")


def test_version_of_the_paper_gets_memory_for_the_draft_only_on_gpus_of_known_size() -> None:
    paper = {**SMALLEST, "engine": {"version": "0.5.8.post1"}}
    fraction = ["--mem-fraction-static", "0.59"]
    assert engine_arguments(router(paper), "speculative")[-2:] == fraction
    other = router({**paper, "nodePool": {"profile": "None"}})
    assert "--mem-fraction-static" not in engine_arguments(other, "speculative")
    slices = {"limits": {"nvidia.com/gpu": 0, "nvidia.com/mig-3g.40gb": 1}}
    pools = {"speculative": {**SMALLEST["pools"]["speculative"], "resources": slices}}
    assert "--mem-fraction-static" not in engine_arguments(router({**paper, "pools": pools}), "speculative")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_leaves_the_memory_to_the_operator_and_the_engine(example: Path) -> None:
    for document in yaml.safe_load_all(example.read_text()):
        if document["kind"] == "DPSRouter":
            spec = parse(document["spec"])
            for pool in (spec.pools.speculative, spec.pools.greedy):
                assert not limits_memory([*spec.engine.args, *pool.args])


def test_model_that_does_not_fit_is_refused() -> None:
    large = {**SMALLEST, "model": {"name": "Qwen/Qwen2.5-72B-Instruct"}}
    with pytest.raises(
        SpecError, match=r"^spec\.engine\.tensorParallel: 135\.4 GiB .* do not fit into 80\.0 GiB"
    ):
        engine_arguments(router(large), "greedy")
    assert engine_arguments(router({**large, "engine": {"tensorParallel": 4}}), "greedy")
