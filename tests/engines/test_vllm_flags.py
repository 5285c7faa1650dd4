"""vLLM's command lines, compared with the option lists recorded from its own parsers."""

import json
from typing import Any

import pytest

from dps_engines.launch import Adapter, Algorithm, EngineError, Launch, Speculation, Traces
from dps_engines.model_fit import GIB
from dps_engines.registry import RUNTIMES
from dps_engines.vllm.flags import MANAGED, SHORT, UNSUPPORTED
from dps_testkit.engine_options import Options, check_accepted, recorded_options

OPTIONS = {version: recorded_options("vllm", version) for version in ("0.12.0", "0.32.0")}
VLLM = RUNTIMES["VLLM"]
IMAGE = "registry/vllm-suffix:v0.32.0"

SPECULATIONS: dict[str, tuple[Speculation, dict[str, Any]]] = {
    "suffix": (Speculation("Suffix"), {"method": "suffix"}),
    "suffix with a limit": (
        Speculation("Suffix", draft_tokens=17),
        {"method": "suffix", "num_speculative_tokens": 16},
    ),
    "n-grams": (Speculation("Ngram"), {"method": "ngram", "num_speculative_tokens": 11}),
    "fewer n-gram tokens": (
        Speculation("Ngram", draft_tokens=5),
        {"method": "ngram", "num_speculative_tokens": 4},
    ),
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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("speculation", [None, Speculation("Suffix")], ids=["greedy", "speculative"])
def test_every_argument_is_accepted_by_every_supported_version(
    options: Options, speculation: Speculation | None
) -> None:
    made = launch(
        speculation,
        tokenizer="t",
        revision="v2",
        traces=Traces("http://c:4317"),
        adapters=(Adapter("sql", "org/sql"), Adapter("chat", "/models/chat")),
    )
    check_accepted(options, VLLM.arguments(made))


def test_adapters_have_the_names_that_they_have_in_sglang() -> None:
    line = VLLM.arguments(launch(adapters=(Adapter("sql", "org/sql"), Adapter("chat", "/models/chat"))))
    assert line[-4:] == ["--lora-modules", "served:sql=org/sql", "served:chat=/models/chat", "--enable-lora"]


def test_every_managed_or_refused_name_is_an_option() -> None:
    assert {*MANAGED, *UNSUPPORTED, *SHORT, *SHORT.values()} <= set(OPTIONS["0.32.0"])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_other_option_may_be_passed(options: Options) -> None:
    VLLM.check_arguments(sorted(set(options) - {*MANAGED, *UNSUPPORTED, *SHORT}), Speculation("Ngram"))


REFUSED_ARGUMENTS = {
    "--port": "--port is set by the operator; remove it",
    "--served_model_name=x": "--served_model_name is set by spec.model.servedName; remove it",
    "--tensor": "--tensor is set by spec.engine.tensorParallel; remove it",
    "-tp=2": "-tp is set by spec.engine.tensorParallel; remove it",
    "--speculative-config.method=ngram": "--speculative-config.method is set by "
    "spec.pools.speculative.speculation; remove it",
    "-sc.method": "-sc.method is set by spec.pools.speculative.speculation; remove it",
    "--spec-method": "--spec-method is set by spec.pools.speculative.speculation; remove it",
    "--no-enable-prompt-tokens-details": "--no-enable-prompt-tokens-details is set by the operator; remove it",
    "--api-key=secret": "--api-key is not supported: the gateway does not know this key, so an engine with this flag "
    "would answer every request with 401; in a DPSRouter, set spec.engine.apiKeySecretRef; remove it",
    "--chat-template=t.jinja": "--chat-template is not supported: the gateway counts prompts with the chat template of "
    "the tokenizer, so its ΔL could differ from the engine's; store the template with a tokenizer, and set "
    "spec.model.tokenizer; remove it",
    "--config": "--config is not supported: flags in a file are not checked; remove it",
    "-dp=2": "-dp is not supported: an engine has the GPUs of spec.engine.tensorParallel, which are on one node; "
    "remove it",
    **{
        flag: f"{flag} is not supported: an engine has the GPUs of spec.engine.tensorParallel, which are on one node; "
        "remove it"
        for flag in ("--pipeline_parallel_size", "--data-parallel-size", "-pcp", "-n")
    },
}


@pytest.mark.parametrize(("argument", "message"), REFUSED_ARGUMENTS.items())
def test_managed_or_unsupported_flag_is_refused(argument: str, message: str) -> None:
    with pytest.raises(EngineError) as refused:
        VLLM.check_arguments(["--max-model-len", "8192", argument], None)
    assert str(refused.value) == message


def test_prefix_caching_may_be_turned_off() -> None:
    VLLM.check_arguments(["--no-enable-prefix-caching"], None)


STARTED: dict[str, tuple[Speculation | None, str | None, str | None]] = {
    "greedy": (None, None, "0.12.0"),
    "draft model since 0.15": (Speculation("Standalone", "d"), None, "0.15.0"),
    "draft model with the default version": (Speculation("Standalone", "d"), None, None),
    "Eagle in every version": (Speculation("Eagle", "d"), None, "0.12.0"),
    "suffix with an image of its own": (Speculation("Suffix"), IMAGE, None),
}


@pytest.mark.parametrize(("speculation", "image", "version"), STARTED.values(), ids=STARTED.keys())
def test_supported_launch_is_accepted(
    speculation: Speculation | None, image: str | None, version: str | None
) -> None:
    VLLM.check_launch(launch(speculation), image, version)


NOT_STARTED: dict[str, tuple[Launch, str, str]] = {
    "heads that cannot be divided": (
        Launch("Qwen/Qwen2.5-7B-Instruct", "m", 8000, tensor_parallel=8),
        IMAGE,
        "spec.engine.tensorParallel: the 28 attention heads",
    ),
    "draft tree": (launch(Speculation("Eagle", "d", top_k=4)), IMAGE, "topK: vLLM drafts no trees"),
    "draft model before 0.15": (
        launch(Speculation("Standalone", "d")),
        "registry/vllm:v0.14.1",
        "algorithm: vLLM 0.14.1 supports no draft models; use 0.15.0 or newer",
    ),
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


@pytest.mark.parametrize("algorithm", ["Standalone", "Eagle", "Eagle3"])
def test_missing_draft_model_is_refused(algorithm: Algorithm) -> None:
    with pytest.raises(EngineError, match=f"draftModel: {algorithm} needs it"):
        VLLM.arguments(launch(Speculation(algorithm)))


def test_model_that_does_not_fit_is_refused_unless_it_is_quantized() -> None:
    large = Launch("Qwen/Qwen2.5-72B-Instruct", "m", 8000, gpu_bytes=80 * GIB)
    with pytest.raises(
        EngineError, match=r"135\.4 GiB .* do not fit into 80\.0 GiB.* or set --quantization in args"
    ):
        VLLM.memory_arguments(large, "0.32.0", [])
    for argument in ("-q", "--quantization=awq", "--cpu_offload_gb"):
        assert VLLM.memory_arguments(large, "0.32.0", [argument]) == []


def test_memory_of_models_that_fit_is_left_to_vllm() -> None:
    pair = Launch(
        "Qwen/Qwen2.5-7B-Instruct",
        "m",
        8000,
        gpu_bytes=80 * GIB,
        speculation=Speculation("Standalone", "Qwen/Qwen2.5-1.5B-Instruct"),
    )
    assert VLLM.memory_arguments(pair, "0.32.0", []) == []


IMAGES = [
    (None, None, "vllm/vllm-openai:v0.32.0", "0.32.0"),
    (None, "0.12.0", "vllm/vllm-openai:v0.12.0", "0.12.0"),
    (IMAGE, None, IMAGE, "0.32.0"),
    ("registry:5000/vllm:nightly", None, "registry:5000/vllm:nightly", "0.32.0"),
]


@pytest.mark.parametrize(("image", "version", "expected_image", "expected_version"), IMAGES)
def test_version_selects_the_default_image_and_image_tag_selects_the_default_version(
    image: str | None, version: str | None, expected_image: str, expected_version: str
) -> None:
    assert VLLM.image(image, version) == expected_image
    assert VLLM.version(image, version) == expected_version


def test_version_older_than_the_oldest_supported_is_refused() -> None:
    with pytest.raises(EngineError, match=r"vLLM 0\.11\.2 is not supported; use 0\.12\.0 or newer"):
        VLLM.check_version("0.11.2")


def test_traces_over_http_are_sent_to_the_traces_endpoint() -> None:
    line = VLLM.arguments(launch(traces=Traces("https://c/otlp/", "http/protobuf")))
    assert line[-2:] == ["--otlp-traces-endpoint", "https://c/otlp/v1/traces"]


def test_pools_share_no_pages() -> None:
    found = VLLM.unshareable("0.32.0", Speculation("Suffix"), {"speculative": [], "greedy": []})
    assert found is not None
    assert found.reason == "RuntimeNotSupported"
