"""The command lines of SGLang, checked against the recorded options of its own parsers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_operator.api.model import Engine
from dps_operator.api.pools import Speculation
from dps_operator.builders.engine import pool_of
from dps_operator.builders.engine_args import (
    ABBREVIATIONS,
    MANAGED,
    check_args,
    engine_args,
    image,
    speculation_args,
    version,
)
from dps_operator.errors import SpecError
from dps_testkit.operator.routers import EVERYTHING, SMALLEST, router

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = ("0.5.8.post1", "0.5.23")
FLAGS: dict[str, dict[str, Any]] = {
    one: json.loads((FIXTURES / f"sglang-{one}-flags.json").read_text()) for one in VERSIONS
}

ALGORITHMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a chain by default": (
        {"algorithm": "Standalone", "draftModel": "d"},
        ["STANDALONE", "d", "3", "1", "4"],
    ),
    "a longer chain": (
        {"algorithm": "Standalone", "draftModel": "d", "steps": 5},
        ["STANDALONE", "d", "5", "1", "6"],
    ),
    "a tree": (
        {"algorithm": "Eagle", "draftModel": "d", "steps": 3, "topK": 4},
        ["EAGLE", "d", "3", "4", "13"],
    ),
    "a tree that is cut": (
        {"algorithm": "Eagle3", "draftModel": "d", "steps": 5, "topK": 8, "draftTokens": 32},
        ["EAGLE3", "d", "5", "8", "32"],
    ),
}
OPTIONS = [
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
]


@pytest.mark.parametrize(("spec", "values"), ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_a_draft_model_speculates_by_steps_and_branches(spec: dict[str, Any], values: list[str]) -> None:
    made = speculation_args(Speculation.model_validate(spec))
    assert dict(zip(made[::2], made[1::2], strict=True)) == dict(zip(OPTIONS, values, strict=True))


@pytest.mark.parametrize(("tokens", "wanted"), [(None, "12"), (8, "8")])
def test_ngram_has_draft_tokens_and_nothing_else(tokens: int | None, wanted: str) -> None:
    speculation = Speculation(algorithm="Ngram", draft_tokens=tokens)
    assert speculation_args(speculation) == [
        "--speculative-algorithm",
        "NGRAM",
        "--speculative-num-draft-tokens",
        wanted,
    ]


@given(steps=st.integers(1, 32), top_k=st.integers(1, 16))
def test_the_default_draft_tokens_fit_the_tree(steps: int, top_k: int) -> None:
    made = speculation_args(Speculation(algorithm="Eagle", draft_model="d", steps=steps, top_k=top_k))
    assert top_k < int(made[-1]) <= 1 + top_k + (steps - 1) * top_k**2


def accepted(flags: dict[str, Any], arguments: list[str]) -> None:
    """Every option exists, has as many values as it takes, and none outside its choices."""
    position = 0
    while position < len(arguments):
        option = flags[arguments[position]]
        position += 1
        if option["nargs"] == 0:
            continue
        value = arguments[position]
        assert not value.startswith("--")
        assert option["choices"] is None or value in option["choices"]
        if option["type"] == "int":
            int(value)
        position += 1


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
@pytest.mark.parametrize("pool", ["speculative", "greedy"])
@pytest.mark.parametrize("algorithm", ["Standalone", "Eagle", "Eagle3", "Ngram"])
def test_every_argument_is_one_that_the_engine_takes(
    flags: dict[str, Any], pool: Any, algorithm: str
) -> None:
    draft = {} if algorithm == "Ngram" else {"draftModel": "d"}
    pools = {"speculative": {"speculation": {"algorithm": algorithm, **draft}}}
    spec = router({**EVERYTHING, "pools": pools}).spec
    accepted(flags, engine_args(spec, pool_of(spec, pool)))


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_what_the_operator_sets_are_options_of_the_engine(flags: dict[str, Any]) -> None:
    assert set(MANAGED) <= set(flags)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_every_other_option_of_the_engine_may_be_passed(flags: dict[str, Any]) -> None:
    free = [name for name in flags if name not in MANAGED and name not in ABBREVIATIONS]
    check_args(free, "spec.engine.args", greedy=False)


CLASHES = [
    ("--port", "--port is set by the operator; remove it"),
    ("--port=1", "--port is set by the operator; remove it"),
    ("--model", "--model is set by spec.model.name; remove it"),
    ("--tp", "--tp is set by spec.engine.tensorParallel; remove it"),
    ("--tensor-parallel-size", "--tensor-parallel-size is set by spec.engine.tensorParallel; remove it"),
    (
        "--speculative-num-step",
        "--speculative-num-step is set by spec.pools.speculative.speculation.steps; remove it",
    ),
]


@pytest.mark.parametrize(("argument", "message"), CLASHES)
def test_an_argument_that_the_operator_sets_is_refused_by_name(argument: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_args(["--log-level", "info", argument], "spec.engine.args", greedy=False)
    assert str(refused.value) == f"spec.engine.args: {message}"


def test_the_greedy_pool_takes_no_speculative_argument() -> None:
    spec = router({**SMALLEST, "engine": {"args": ["--speculative-attention-mode", "decode"]}}).spec
    engine_args(spec, spec.pools.speculative)
    with pytest.raises(SpecError, match="the greedy pool must not speculate"):
        engine_args(spec, spec.pools.greedy)


def test_arguments_of_the_engine_come_before_those_of_the_pool() -> None:
    pools = {**SMALLEST["pools"], "greedy": {"args": ["--log-level", "debug"]}}
    spec = router({**SMALLEST, "engine": {"args": ["--log-level", "info"]}, "pools": pools}).spec
    assert engine_args(spec, spec.pools.greedy)[-4:] == ["--log-level", "info", "--log-level", "debug"]


IMAGES = [
    ({}, "lmsysorg/sglang:v0.5.8.post1", "0.5.8.post1"),
    ({"version": "0.5.23"}, "lmsysorg/sglang:v0.5.23", "0.5.23"),
    ({"image": "reg/sglang:v0.5.23-cu130"}, "reg/sglang:v0.5.23-cu130", "0.5.23"),
    ({"image": "reg:5000/sglang:nightly"}, "reg:5000/sglang:nightly", "0.5.8.post1"),
    ({"image": "reg/sglang:nightly", "version": "0.5.23"}, "reg/sglang:nightly", "0.5.23"),
]


@pytest.mark.parametrize(("engine", "wanted_image", "wanted_version"), IMAGES)
def test_image_and_version_follow_from_each_other(
    engine: dict[str, str], wanted_image: str, wanted_version: str
) -> None:
    read = Engine.model_validate(engine)
    assert (image(read), version(read)) == (wanted_image, wanted_version)


def test_a_version_that_was_never_checked_is_refused() -> None:
    spec = router({**SMALLEST, "engine": {"version": "0.4.9"}}).spec
    with pytest.raises(SpecError, match=r"SGLang 0\.4\.9 is not supported; use 0\.5\.8 or newer"):
        engine_args(spec, spec.pools.greedy)


@pytest.mark.parametrize(
    ("telemetry", "endpoint"),
    [
        ({"otlpEndpoint": "http://collector:4317"}, "collector:4317"),
        (
            {"otlpEndpoint": "http://collector:4318", "protocol": "http/protobuf"},
            "http://collector:4318/v1/traces",
        ),
        (
            {"otlpEndpoint": "https://c/otlp/", "protocol": "http/protobuf"},
            "https://c/otlp/v1/traces",
        ),
    ],
)
def test_traces_go_where_the_protocol_wants_them(telemetry: dict[str, str], endpoint: str) -> None:
    spec = router({**SMALLEST, "telemetry": telemetry}).spec
    made = engine_args(spec, spec.pools.greedy)
    assert made[-3:] == ["--enable-trace", "--otlp-traces-endpoint", endpoint]
