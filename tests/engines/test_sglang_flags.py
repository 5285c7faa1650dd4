"""SGLang's command lines, compared with the option lists recorded from its own parsers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_engines.flags import Flag
from dps_engines.launch import Adapter, Algorithm, EngineError, Launch, Speculation, Traces
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.flags import (
    ABBREVIATIONS,
    DP_ATTENTION,
    MANAGED,
    UNSUPPORTED,
    UNSUPPORTED_WITHOUT_DP_ATTENTION,
)
from dps_testkit.engine_options import Options, check_accepted, recorded_options

OPTIONS = {version: recorded_options("sglang", version) for version in ("0.5.8.post1", "0.5.23")}
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


@pytest.mark.parametrize("algorithm", ["Standalone", "Eagle", "Eagle3"])
def test_missing_draft_model_is_refused(algorithm: Algorithm) -> None:
    with pytest.raises(EngineError, match=f"draftModel: {algorithm} needs it; set it, or choose Ngram"):
        speculative_arguments(Speculation(algorithm))


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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("algorithm", [*SGLANG.algorithms, None])
def test_every_argument_is_accepted_by_every_supported_version(
    options: Options, algorithm: Algorithm | None
) -> None:
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
    check_accepted(options, SGLANG.arguments(launch))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_managed_or_refused_flag_is_an_option_of_every_supported_version(options: Options) -> None:
    assert {*MANAGED, *UNSUPPORTED, *UNSUPPORTED_WITHOUT_DP_ATTENTION, DP_ATTENTION} <= set(options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_other_option_may_be_passed(options: Options) -> None:
    free = set(options) - set(MANAGED) - set(ABBREVIATIONS) - set(UNSUPPORTED)
    SGLANG.check_arguments(sorted(free), Speculation("Ngram"))


def test_value_of_a_flag_may_be_a_decimal_number() -> None:
    flag = Flag("--schedule-conservativeness", "the test", lambda _: 0.3)
    assert flag.value(Launch("m", "m", 30000)) == 0.3


MANAGED_ARGUMENTS = [
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


@pytest.mark.parametrize(("argument", "message"), MANAGED_ARGUMENTS)
def test_managed_flag_is_refused_with_the_field_that_sets_it(argument: str, message: str) -> None:
    with pytest.raises(EngineError) as refused:
        SGLANG.check_arguments(["--log-level", "info", argument], Speculation("Ngram"))
    assert str(refused.value) == message


@pytest.mark.parametrize("argument", ["--api-key", "--api-key=secret", "--api"])
def test_api_key_that_the_gateway_does_not_know_is_refused(argument: str) -> None:
    with pytest.raises(EngineError, match="is not supported: the gateway does not know this key"):
        SGLANG.check_arguments([argument, "secret"], None)


@pytest.mark.parametrize("argument", ["--chat-template", "--chat-template=t.jinja", "--chat"])
def test_chat_template_that_the_gateway_does_not_know_is_refused(argument: str) -> None:
    with pytest.raises(
        EngineError, match="is not supported: the gateway counts prompts with the chat template"
    ):
        SGLANG.check_arguments([argument, "t.jinja"], None)


@pytest.mark.parametrize("argument", ["--pp-size", "--pp-size=2", "--pipeline-parallel-size", "--nnodes"])
def test_flag_that_needs_other_gpus_is_refused(argument: str) -> None:
    with pytest.raises(EngineError) as refused:
        SGLANG.check_arguments([argument, "2"], None)
    assert str(refused.value) == (
        f"{argument.split('=')[0]} is not supported: an engine has the GPUs of spec.engine.tensorParallel, which are "
        "on one node; remove it"
    )


@pytest.mark.parametrize("argument", ["--dp-size", "--dp", "--data-parallel-size=2"])
def test_data_parallelism_is_refused_unless_it_divides_the_gpus(argument: str) -> None:
    made = Launch("m", "m", 30000)
    with pytest.raises(
        EngineError, match=f"^{argument.split('=')[0]} is not supported without --enable-dp-att"
    ):
        SGLANG.check_launch(made, None, None, [argument, "2"])
    SGLANG.check_launch(made, None, None, [argument, "2", "--enable-dp-attention"])


def test_heads_need_not_be_divided_among_the_gpus_with_dp_attention() -> None:
    made = Launch("Qwen/Qwen2.5-7B-Instruct", "m", 30000, tensor_parallel=8)
    with pytest.raises(EngineError, match="28 attention heads"):
        SGLANG.check_launch(made, None, None)
    SGLANG.check_launch(made, None, None, ["--enable-dp-attention", "--dp-size", "2"])


ADAPTERS = (Adapter("sql", "org/sql"), Adapter("chat", "/models/chat"))
LORA_ALGORITHMS = {"0.5.8.post1": {"Ngram"}, "0.5.23": {"Ngram", "Eagle", "Eagle3"}}


def test_adapters_are_loaded_under_their_names() -> None:
    line = SGLANG.arguments(Launch("m", "m", 30000, adapters=ADAPTERS))
    assert line[-3:] == ["--lora-paths", "sql=org/sql", "chat=/models/chat"]
    with pytest.raises(EngineError, match=r"^--lora-paths is set by spec\.model\.adapters; remove it$"):
        SGLANG.check_arguments(["--lora-paths", "a=b"], None)


@pytest.mark.parametrize("version", LORA_ALGORITHMS)
@pytest.mark.parametrize("algorithm", [None, *SGLANG.algorithms])
@pytest.mark.parametrize(
    ("adapters", "arguments", "cause"),
    [(ADAPTERS, [], "spec.model.adapters"), ((), ["--enable-lora"], "--enable-lora")],
    ids=["adapters", "flag"],
)
def test_adapters_are_refused_with_algorithms_with_which_sglang_does_not_start(
    version: str,
    algorithm: Algorithm | None,
    adapters: tuple[Adapter, ...],
    arguments: list[str],
    cause: str,
) -> None:
    speculation = Speculation(algorithm, "d") if algorithm else None
    launch = Launch("m", "m", 30000, speculation=speculation, adapters=adapters)
    if algorithm is None or algorithm in LORA_ALGORITHMS[version]:
        SGLANG.check_launch(launch, None, version, arguments)
        return
    with pytest.raises(EngineError) as refused:
        SGLANG.check_launch(launch, None, version, arguments)
    assert str(refused.value) == (
        f"spec.pools.speculative.speculation.algorithm: SGLang {version} supports no LoRA adapters with {algorithm}; "
        f"choose {' or '.join(name for name in SGLANG.algorithms if name in LORA_ALGORITHMS[version])}, or remove "
        f"{cause}"
    )


IMAGES = [
    (None, None, "lmsysorg/sglang:v0.5.23", "0.5.23"),
    (None, "0.5.8.post1", "lmsysorg/sglang:v0.5.8.post1", "0.5.8.post1"),
    ("reg/sglang:v0.5.23-cu130", None, "reg/sglang:v0.5.23-cu130", "0.5.23"),
    ("reg:5000/sglang:nightly", None, "reg:5000/sglang:nightly", "0.5.23"),
    ("reg/sglang:nightly", "0.5.8.post1", "reg/sglang:nightly", "0.5.8.post1"),
]


@pytest.mark.parametrize(("image", "version", "expected_image", "expected_version"), IMAGES)
def test_version_selects_the_default_image_and_image_tag_selects_the_default_version(
    image: str | None, version: str | None, expected_image: str, expected_version: str
) -> None:
    assert SGLANG.image(image, version) == expected_image
    assert SGLANG.version(image, version) == expected_version


def test_version_older_than_the_oldest_supported_is_refused() -> None:
    with pytest.raises(EngineError, match=r"SGLang 0\.4\.9 is not supported; use 0\.5\.8 or newer"):
        SGLANG.check_version("0.4.9")


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
