"""The command lines of two SGLang servers on one machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dps_engines.launch import EngineError, MooncakeCache
from dps_local.sglang import EngineCommand, Placement, SGLangOptions, place, sglang_command

OPTIONS = SGLangOptions(model="/models/m", draft_model="/models/d", python="/venv/bin/python")

MANAGED = [
    "--model-path", "/models/m", "--served-model-name", "m", "--host", "127.0.0.1", "--port", "31000",
    "--tp-size", "1", "--enable-metrics", "--enable-cache-report",
]  # fmt: skip
CHAIN = [
    "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "/models/d",
    "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
]  # fmt: skip
CPU = [
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--disable-overlap-schedule", "--skip-server-warmup",
    "--mem-fraction-static", "0.3", "--max-total-tokens", "40000", "--sleep-on-idle",
]  # fmt: skip
VERIFY_ON_CPU = ["--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"]
ON_GPU_1 = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "CUDA_VISIBLE_DEVICES": "1"}
ON_CPU = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "SGLANG_USE_CPU_ENGINE": "1",
}
GPU_1 = Placement(["1"])


def start(
    pool: Any = "greedy",
    placement: Placement = GPU_1,
    options: SGLangOptions = OPTIONS,
    **more: Any,
) -> EngineCommand:
    return sglang_command(options, pool, placement, port=31000, served_name="m", **more)


COMMANDS: dict[str, tuple[Any, Placement, list[str], dict[str, str]]] = {
    "speculative, separate GPU": ("speculative", GPU_1, [*MANAGED, *CHAIN], ON_GPU_1),
    "greedy, separate GPU": ("greedy", GPU_1, MANAGED, ON_GPU_1),
    "speculative, first on a shared GPU": (
        "speculative",
        Placement(["1"], shared=True),
        [*MANAGED, *CHAIN, "--mem-fraction-static", "0.45"],
        ON_GPU_1,
    ),
    "greedy, second on a shared GPU": (
        "greedy",
        Placement(["1"], shared=True),
        [*MANAGED, "--mem-fraction-static", "0.8"],
        ON_GPU_1,
    ),
    "speculative, on a CPU": ("speculative", Placement([]), [*MANAGED, *CHAIN, *CPU, *VERIFY_ON_CPU], ON_CPU),
    "greedy, on a CPU": ("greedy", Placement([]), [*MANAGED, *CPU], ON_CPU),
}


@pytest.mark.parametrize(
    ("pool", "placement", "arguments", "environment"), COMMANDS.values(), ids=COMMANDS.keys()
)
def test_command_line_and_environment_depend_on_the_pool_and_its_gpus(
    pool: Any, placement: Placement, arguments: list[str], environment: dict[str, str]
) -> None:
    started = start(pool, placement)
    assert started.command == ["/venv/bin/python", "-m", "sglang.launch_server", *arguments]
    assert started.environment == environment


def test_user_arguments_come_last_and_so_take_precedence() -> None:
    options = replace(OPTIONS, arguments=["--mem-fraction-static", "0.3"])
    command = start("greedy", Placement(["0"], shared=True), options).command
    assert command[-4:] == ["--mem-fraction-static", "0.8", "--mem-fraction-static", "0.3"]


def test_spans_are_exported_to_the_otlp_endpoint() -> None:
    traced = start(otlp_endpoint="http://127.0.0.1:4317")
    assert traced.command[-3:] == ["--enable-trace", "--otlp-traces-endpoint", "127.0.0.1:4317"]
    assert traced.environment == {**ON_GPU_1, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}


CACHE = MooncakeCache("127.0.0.1:50051", 4 * 2**30, owner="dps up", version="0.5.23")
SHARED = replace(OPTIONS, version="0.5.23")


@pytest.mark.parametrize(("inherited", "path"), [(None, "/stack/plugin"), ("/more", "/stack/plugin:/more")])
def test_servers_with_a_common_prefix_cache_load_the_plugin(
    monkeypatch: pytest.MonkeyPatch, inherited: str | None, path: str
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if inherited is not None:
        monkeypatch.setenv("PYTHONPATH", inherited)
    sharing = start(options=SHARED, prefix_cache=CACHE, plugin=Path("/stack/plugin"))
    config = json.loads(sharing.command[-1])
    settings = {key: config[key] for key in ("master_server_address", "global_segment_size")}
    assert settings == {"master_server_address": "127.0.0.1:50051", "global_segment_size": 4 * 2**30}
    assert sharing.environment == {
        **ON_GPU_1,
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        "PYTHONPATH": path,
    }


@pytest.mark.parametrize(
    ("options", "cache", "message"),
    [
        (replace(OPTIONS, arguments=["--port=1"]), None, "-- --port: dps up sets this argument; use the"),
        (replace(OPTIONS, version="0.4.9"), None, r"SGLang 0\.4\.9 is not supported; use 0\.5\.23 or newer"),
        (replace(OPTIONS, steps=0), None, r"spec\.pools\.speculative\.speculation\.steps"),
        (
            replace(SHARED, version="0.5.24"),
            CACHE,
            r"does not support SGLang 0\.5\.24; install SGLang 0\.5\.23",
        ),
        (replace(SHARED, arguments=["--enable-lora"]), CACHE, "remove --enable-lora"),
    ],
)
def test_invalid_options_are_rejected(
    options: SGLangOptions, cache: MooncakeCache | None, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        start("speculative", options=options, prefix_cache=cache, plugin=Path("/p") if cache else None)


PLACES: dict[str, tuple[list[str], int, list[str]]] = {
    "no GPU": ([], 1, ["on the CPU (for smoke tests only)"] * 2),
    "one GPU": (["0"], 1, ["on GPU 0 (shared by both engines)"] * 2),
    "more GPUs than needed": (["4", "5", "6"], 1, ["on GPU 4", "on GPU 5"]),
    "tensor parallelism, too few for both": (
        ["0", "1", "2"],
        2,
        ["on GPU 0, 1 (shared by both engines)"] * 2,
    ),
    "tensor parallelism, enough for both": (list("0123"), 2, ["on GPU 0, 1", "on GPU 2, 3"]),
}


@pytest.mark.parametrize(("gpus", "tensor_parallel", "wanted"), PLACES.values(), ids=PLACES.keys())
def test_servers_get_separate_gpus_if_there_are_enough(
    gpus: list[str], tensor_parallel: int, wanted: list[str]
) -> None:
    placed = place(gpus, tensor_parallel)
    assert [str(placed["speculative"]), str(placed["greedy"])] == wanted


def test_tensor_parallelism_beyond_the_visible_gpus_is_an_error() -> None:
    with pytest.raises(EngineError, match="--tensor-parallel 2 requires 2 GPUs; visible: 1"):
        place(["0"], 2)
