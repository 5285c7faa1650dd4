"""SGLang's command lines, compared with the option lists recorded from its own parsers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_engines.launch import Adapter, Algorithm, EngineError, Launch, Speculation, Traces
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.flags import (
    ABBREVIATIONS,
    DP_ATTENTION,
    MANAGED,
    UNSUPPORTED,
    UNSUPPORTED_WITHOUT_DP_ATTENTION,
)
from dps_testkit.engine_options import check_accepted, recorded_options

OPTIONS = recorded_options("sglang", "0.5.23")
SGLANG = RUNTIMES["SGLang"]

SPECULATIONS: dict[str, tuple[Speculation, list[str]]] = {
    "default chain": (Speculation("Standalone", "d"), ["STANDALONE", "d", "3", "1", "4"]),
    "longer chain": (Speculation("Standalone", "d", steps=5), ["STANDALONE", "d", "5", "1", "6"]),
    "tree": (Speculation("Eagle", "d", steps=3, top_k=4), ["EAGLE", "d", "3", "4", "13"]),
    "pruned tree": (
        Speculation("Eagle3", "d", steps=5, top_k=8, draft_tokens=32),
        ["EAGLE3", "d", "5", "8", "32"],
    ),
}
SPECULATIVE_FLAGS = [
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
]


def speculative_arguments(speculation: Speculation) -> list[str]:
    """The part of the command line that starts with the speculative algorithm."""
    line = SGLANG.arguments(Launch("m", "m", 30000, speculation=speculation))
    return line[line.index("--speculative-algorithm") :]


@pytest.mark.parametrize(("speculation", "values"), SPECULATIONS.values(), ids=SPECULATIONS.keys())
def test_speculation_with_a_draft_model_sets_steps_branches_and_draft_tokens(
    speculation: Speculation, values: list[str]
) -> None:
    line = speculative_arguments(speculation)
    assert dict(zip(line[::2], line[1::2], strict=True)) == dict(zip(SPECULATIVE_FLAGS, values, strict=True))


@pytest.mark.parametrize(("tokens", "expected"), [(None, "12"), (8, "8")])
def test_ngram_sets_only_draft_tokens(tokens: int | None, expected: str) -> None:
    assert speculative_arguments(Speculation("Ngram", draft_tokens=tokens)) == [
        "--speculative-algorithm",
        "NGRAM",
        "--speculative-num-draft-tokens",
        expected,
    ]


@given(steps=st.integers(1, 32), top_k=st.integers(1, 16))
def test_default_draft_tokens_fit_the_draft_tree(steps: int, top_k: int) -> None:
    line = speculative_arguments(Speculation("Eagle", "d", steps=steps, top_k=top_k))
    assert top_k < int(line[-1]) <= 1 + top_k + (steps - 1) * top_k**2


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 33}, "steps"),
        ({"top_k": 17}, "topK"),
        ({"draft_tokens": 1}, "draftTokens"),
    ],
)
def test_setting_outside_its_limits_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineError, match=rf"^spec\.pools\.speculative\.speculation\.{field}: "):
        Speculation("Eagle", "d", **settings)


@pytest.mark.parametrize("algorithm", [*SGLANG.algorithms, None])
def test_every_argument_is_accepted_by_the_supported_version(algorithm: Algorithm | None) -> None:
    draft = None if algorithm == "Ngram" else "d"
    speculation = Speculation(algorithm, draft) if algorithm else None
    launch = Launch(
        "m",
        "served",
        30000,
        tensor_parallel=2,
        speculation=speculation,
        traces=Traces("http://c:4317"),
        tokenizer="t",
        revision="main",
        adapters=ADAPTERS,
    )
    check_accepted(OPTIONS, SGLANG.arguments(launch))


def test_every_managed_or_refused_flag_is_an_option() -> None:
    assert {*MANAGED, *UNSUPPORTED, *UNSUPPORTED_WITHOUT_DP_ATTENTION, DP_ATTENTION} <= set(OPTIONS)


def test_every_other_option_may_be_passed() -> None:
    free = set(OPTIONS) - set(MANAGED) - set(ABBREVIATIONS) - set(UNSUPPORTED)
    SGLANG.check_arguments(sorted(free), Speculation("Ngram"))


REFUSED_ARGUMENTS = {
    "set by the operator": ["--port", "--port=1"],
    "set by spec.model.name": ["--model"],
    "set by spec.engine.tensorParallel": ["--tp", "--tensor-parallel-size"],
    "set by spec.pools.speculative.speculation.steps": ["--speculative-num-step"],
    "set by spec.model.adapters": ["--lora-paths"],
    "not supported: the gateway does not know this key": ["--api-key", "--api-key=secret", "--api"],
    "not supported: the gateway counts prompts": ["--chat-template", "--chat-template=t.jinja", "--chat"],
    "not supported: an engine has the GPUs of spec.engine.tensorParallel": ["--pp-size=2", "--nnodes"],
}


@pytest.mark.parametrize(("cause", "arguments"), REFUSED_ARGUMENTS.items())
def test_managed_or_unsupported_flag_is_refused(cause: str, arguments: list[str]) -> None:
    for argument in arguments:
        with pytest.raises(EngineError, match=f"^{argument.partition('=')[0]} is {cause}.*; remove it$"):
            SGLANG.check_arguments(["--log-level", "info", argument, "2"], Speculation("Ngram"))


@pytest.mark.parametrize("argument", ["--dp-size", "--dp", "--data-parallel-size=2"])
def test_data_parallelism_is_refused_unless_it_divides_the_gpus(argument: str) -> None:
    made = Launch("m", "m", 30000)
    with pytest.raises(
        EngineError, match=f"^{argument.split('=')[0]} is not supported without --enable-dp-att"
    ):
        SGLANG.check_launch(made, None, None, [argument, "2"])
    SGLANG.check_launch(made, None, None, [argument, "2", "--enable-dp-attention"])


ADAPTERS = (Adapter("sql", "org/sql"), Adapter("chat", "/models/chat"))
LORA_ALGORITHMS = {"Ngram", "Eagle", "Eagle3"}


def test_adapters_are_loaded_under_their_names() -> None:
    line = SGLANG.arguments(Launch("m", "m", 30000, adapters=ADAPTERS))
    assert line[-3:] == ["--lora-paths", "sql=org/sql", "chat=/models/chat"]


@pytest.mark.parametrize("algorithm", [None, *SGLANG.algorithms])
@pytest.mark.parametrize(
    ("adapters", "arguments", "cause"),
    [(ADAPTERS, [], "spec.model.adapters"), ((), ["--enable-lora"], "--enable-lora")],
    ids=["adapters", "flag"],
)
def test_adapters_are_refused_with_algorithms_with_which_sglang_does_not_start(
    algorithm: Algorithm | None,
    adapters: tuple[Adapter, ...],
    arguments: list[str],
    cause: str,
) -> None:
    speculation = Speculation(algorithm, "d") if algorithm else None
    launch = Launch("m", "m", 30000, speculation=speculation, adapters=adapters)
    if algorithm is None or algorithm in LORA_ALGORITHMS:
        SGLANG.check_launch(launch, None, None, arguments)
        return
    with pytest.raises(EngineError) as refused:
        SGLANG.check_launch(launch, None, None, arguments)
    assert str(refused.value) == (
        f"spec.pools.speculative.speculation.algorithm: SGLang supports no LoRA adapters with {algorithm}; "
        f"choose {' or '.join(name for name in SGLANG.algorithms if name in LORA_ALGORITHMS)}, or remove "
        f"{cause}"
    )


@pytest.mark.parametrize(
    ("traces", "endpoint"),
    [
        (Traces("http://collector:4317"), "collector:4317"),
        (Traces("http://collector:4318", "http/protobuf"), "http://collector:4318/v1/traces"),
        (Traces("https://c/otlp/", "http/protobuf"), "https://c/otlp/v1/traces"),
    ],
)
def test_traces_endpoint_has_the_form_of_its_protocol(traces: Traces, endpoint: str) -> None:
    line = SGLANG.arguments(Launch("m", "m", 30000, traces=traces))
    assert line[-3:] == ["--enable-trace", "--otlp-traces-endpoint", endpoint]


def test_suffix_decoding_is_refused() -> None:
    with pytest.raises(EngineError, match=r"algorithm: SGLang has no suffix decoding; choose Ngram, or set"):
        SGLANG.check_launch(Launch("m", "m", 30000, speculation=Speculation("Suffix")), None, None)
