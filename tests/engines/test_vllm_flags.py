"""vLLM's command lines, compared with the option lists recorded from its own parsers."""

import json
from typing import Any

import pytest

from dps_engines.launch import Adapter, EngineError, Launch, Speculation, Traces
from dps_engines.model_fit import GIB
from dps_engines.registry import RUNTIMES
from dps_engines.vllm.flags import MANAGED, SHORT, UNSUPPORTED
from dps_testkit.engine_options import check_accepted, recorded_options

OPTIONS = recorded_options("vllm", "0.32.0")
VLLM = RUNTIMES["VLLM"]
IMAGE = "registry/vllm-suffix:v0.32.0"

SPECULATIONS: dict[str, tuple[Speculation, dict[str, Any]]] = {
    "suffix": (Speculation("Suffix"), {"method": "suffix"}),
    "n-grams": (Speculation("Ngram"), {"method": "ngram", "num_speculative_tokens": 11}),
    "draft model": (
        Speculation("Standalone", "d"),
        {"method": "draft_model", "model": "d", "num_speculative_tokens": 3},
    ),
    "Eagle head": (
        Speculation("Eagle", "d", steps=5, draft_tokens=6),
        {"method": "eagle", "model": "d", "num_speculative_tokens": 5},
    ),
    "Eagle 3 head": (
        Speculation("Eagle3", "d", top_k=1),
        {"method": "eagle3", "model": "d", "num_speculative_tokens": 3},
    ),
}


def launch(speculation: Speculation | None = None, **fields: Any) -> Launch:
    return Launch("m", "served", 8000, speculation=speculation, **fields)


def test_command_line_of_a_launch() -> None:
    made = launch(tensor_parallel=2, tokenizer="t", revision="v2", traces=Traces("http://collector:4317"))
    assert VLLM.arguments(made) == [
        *("--model", "m"),
        *("--served-model-name", "served"),
        *("--tokenizer", "t"),
        *("--revision", "v2"),
        *("--host", "0.0.0.0"),
        *("--port", "8000"),
        *("--tensor-parallel-size", "2"),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        *("--otlp-traces-endpoint", "http://collector:4317"),
    ]


@pytest.mark.parametrize(("speculation", "config"), SPECULATIONS.values(), ids=SPECULATIONS.keys())
def test_speculation_is_one_json_object(speculation: Speculation, config: dict[str, Any]) -> None:
    line = VLLM.arguments(launch(speculation))
    assert line[-2] == "--speculative-config"
    assert json.loads(line[-1]) == config


@pytest.mark.parametrize("speculation", [None, Speculation("Suffix")], ids=["greedy", "speculative"])
def test_every_argument_is_accepted_by_the_supported_version(speculation: Speculation | None) -> None:
    made = launch(
        speculation,
        tokenizer="t",
        revision="v2",
        traces=Traces("http://c:4317"),
        adapters=(Adapter("sql", "org/sql"), Adapter("chat", "/models/chat")),
    )
    check_accepted(OPTIONS, VLLM.arguments(made))


def test_adapters_have_the_names_that_they_have_in_sglang() -> None:
    line = VLLM.arguments(launch(adapters=(Adapter("sql", "org/sql"), Adapter("chat", "/models/chat"))))
    assert line[-4:] == ["--lora-modules", "served:sql=org/sql", "served:chat=/models/chat", "--enable-lora"]


def test_every_managed_or_refused_name_is_an_option() -> None:
    assert {*MANAGED, *UNSUPPORTED, *SHORT, *SHORT.values()} <= set(OPTIONS)


def test_every_other_option_may_be_passed() -> None:
    VLLM.check_arguments(sorted(set(OPTIONS) - {*MANAGED, *UNSUPPORTED, *SHORT}), Speculation("Ngram"))


REFUSED_ARGUMENTS = {
    "set by the operator": ["--port", "--no-enable-prompt-tokens-details"],
    "set by spec.model.servedName": ["--served_model_name=x"],
    "set by spec.engine.tensorParallel": ["--tensor", "-tp=2"],
    "set by spec.pools.speculative.speculation": [
        *("--speculative-config.method=ngram", "-sc.method", "--spec-method"),
    ],
    "not supported: the gateway does not know this key": ["--api-key=secret"],
    "not supported: the gateway counts prompts": ["--chat-template=t.jinja"],
    "not supported: flags in a file are not checked": ["--config"],
    "not supported: an engine has the GPUs of spec.engine.tensorParallel": [
        *("-dp=2", "--pipeline_parallel_size", "--data-parallel-size", "-pcp", "-n"),
    ],
}


@pytest.mark.parametrize(("cause", "arguments"), REFUSED_ARGUMENTS.items())
def test_managed_or_unsupported_flag_is_refused(cause: str, arguments: list[str]) -> None:
    for argument in arguments:
        with pytest.raises(EngineError, match=f"^{argument.partition('=')[0]} is {cause}.*; remove it$"):
            VLLM.check_arguments(["--max-model-len", "8192", argument], None)


def test_prefix_caching_may_be_turned_off() -> None:
    VLLM.check_arguments(["--no-enable-prefix-caching"], None)


NOT_STARTED: dict[str, tuple[Launch, str, str]] = {
    "draft tree": (launch(Speculation("Eagle", "d", top_k=4)), IMAGE, "topK: vLLM drafts no trees"),
    "suffix with the default image": (
        launch(Speculation("Suffix")),
        "",
        "Suffix needs the Python package arctic-inference, which is not in vllm/vllm-openai:v0.32.0",
    ),
    "shared GPU": (
        launch(shares_gpu_with=launch()),
        IMAGE,
        "spec.placement: SharedGPU divides the memory of a GPU only between SGLang engines",
    ),
}


@pytest.mark.parametrize(("made", "image", "message"), NOT_STARTED.values(), ids=NOT_STARTED.keys())
def test_unsupported_launch_is_refused(made: Launch, image: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        VLLM.check_launch(made, image or None, None)


def test_size_is_not_known_of_a_model_that_is_quantized() -> None:
    large = Launch("Qwen/Qwen2.5-72B-Instruct", "m", 8000, gpu_bytes=80 * GIB)
    assert "do not fit" in VLLM.memory_warning(large, [])
    for argument in ("-q", "--quantization=awq", "--cpu_offload_gb"):
        assert VLLM.memory_warning(large, [argument]) == ""


def test_traces_over_http_are_sent_to_the_traces_endpoint() -> None:
    line = VLLM.arguments(launch(traces=Traces("https://c/otlp/", "http/protobuf")))
    assert line[-2:] == ["--otlp-traces-endpoint", "https://c/otlp/v1/traces"]


def test_pools_share_no_pages() -> None:
    found = VLLM.unshareable("0.32.0", Speculation("Suffix"), {"speculative": [], "greedy": []})
    assert found is not None
    assert found.reason == "RuntimeNotSupported"
