"""The emulated storage level of HiCache, compared with measurements of SGLang 0.5.23 servers that share a directory."""

import json
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.flags import parse
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.server import ENGINE, create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.emulated_sglang.storage_flags import FILE_DIRECTORY
from dps_testkit.clock import VirtualClock
from dps_testkit.engine_contract.storage import (
    FAILURES,
    GREEDY,
    SLOW,
    SPECULATIVE,
    STEPS,
    TRANSFERS,
    Step,
    play,
    recording,
)

Client = TestClient[Any, Any]
Start = Callable[..., Awaitable[Client]]

RECORDED = [
    *(("STANDALONE", 64, ""), ("NGRAM", 64, ""), ("STANDALONE", 1, ""), ("NGRAM", 1, "")),
    ("STANDALONE", 64, "-transfers"),
]
"""The algorithms, the page sizes and the kinds of the recordings."""
PROMPT = list(range(2000))
LONGER = list(range(3000))
HIERARCHICAL = (
    "--enable-hierarchical-cache",
    "--enable-cache-report",
    "--hicache-write-policy",
    "write_through",
)
FILE = (*HIERARCHICAL, "--hicache-storage-backend", "file")
DYNAMIC = (*HIERARCHICAL, "--hicache-storage-backend", "dynamic")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    **{name: ("--speculative-algorithm", name) for name in ("NGRAM", "STANDALONE", "EAGLE")},
}


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts.load(str(bundled_tokenizer()))


def settings_of(*flags: str) -> EngineSettings:
    return parse(["--tokenizer-path", str(bundled_tokenizer()), *flags])


@pytest.fixture
async def start(prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts engines in virtual time that share a directory."""
    monkeypatch.setenv(FILE_DIRECTORY, str(tmp_path / "pages"))
    async with AsyncExitStack() as stack:

        async def start(*flags: str) -> Client:
            app = create_app(settings_of(*flags), prompts, VirtualClock())
            return await stack.enter_async_context(TestClient(TestServer(app)))

        yield start


@pytest.fixture
def extra_config(tmp_path: Path) -> dict[str, Any]:
    """The plugin's settings, as in docs/prefix-cache.md."""
    (tmp_path / "secret").write_text("a secret of thirty-two bytes....")
    return {
        "backend_name": "dps",
        "module_path": "dps_sglang.adapter",
        "class_name": "SharedPrefixCache",
        "interface_v1": 1,
        "directory": str(tmp_path / "pages"),
        "secret_file": str(tmp_path / "secret"),
        "max_gib": 1,
    }


def write_secret(extra_config: dict[str, Any], secret: str) -> None:
    Path(extra_config["secret_file"]).write_text(secret)


def plugin(extra_config: dict[str, Any]) -> tuple[str, ...]:
    return (*DYNAMIC, "--hicache-storage-backend-extra-config", json.dumps(extra_config))


async def generate(client: Client, prompt: list[int], tokens: int = 1, **fields: Any) -> dict[str, Any]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}, **fields}
    answer: dict[str, Any] = await (await client.post("/generate", json=body)).json()
    return answer


async def cached(client: Client, prompt: list[int], **fields: Any) -> int:
    """The cached tokens of a request; all of them come from the storage."""
    info = (await generate(client, prompt, **fields))["meta_info"]
    tokens: int = info["cached_tokens"]
    if tokens:
        assert info["cached_tokens_details"]["storage"] == tokens
    return tokens


@pytest.mark.parametrize(("page", "whole"), [(1, 1999), (64, 1984)])
@pytest.mark.parametrize(
    ("writer", "reader", "found"),
    [
        ("greedy", "greedy", True),
        ("greedy", "NGRAM", True),
        ("greedy", "STANDALONE", False),
        ("NGRAM", "greedy", True),
        ("NGRAM", "NGRAM", True),
        ("NGRAM", "STANDALONE", False),
        ("STANDALONE", "greedy", True),
        ("STANDALONE", "NGRAM", True),
        ("STANDALONE", "STANDALONE", True),
        ("EAGLE", "greedy", False),
        ("greedy", "EAGLE", False),
    ],
)
async def test_engines_read_each_others_pages_as_measured_without_the_plugin(
    start: Start, page: int, whole: int, writer: str, reader: str, found: bool
) -> None:
    flags = (*FILE, "--page-size", str(page))
    await generate(await start(*flags, *ALGORITHMS[writer]), PROMPT)
    assert await cached(await start(*flags, *ALGORITHMS[reader]), PROMPT) == (whole if found else 0)


@pytest.mark.parametrize("writer", ["greedy", "NGRAM", "STANDALONE"])
async def test_standalone_engine_with_the_plugin_reads_all_pages(
    start: Start, extra_config: dict[str, Any], writer: str
) -> None:
    flags = plugin(extra_config)
    await generate(await start(*flags, *ALGORITHMS[writer]), PROMPT[:1500])
    assert await cached(await start(*flags, *ALGORITHMS["STANDALONE"]), PROMPT[:1500]) == 1499


@pytest.mark.parametrize(("algorithm", "page", "kind"), RECORDED)
async def test_each_prompt_is_found_as_recorded_from_sglang(
    start: Start, extra_config: dict[str, Any], algorithm: str, page: int, kind: str
) -> None:
    """e2e/prefix_cache and e2e/node compare the recordings with real servers."""
    recorded = json.loads(recording(algorithm, page, kind).read_text())
    flags = (*plugin(extra_config), "--page-size", str(page))
    engines = {GREEDY: await start(*flags), SPECULATIVE: await start(*flags, *ALGORITHMS[algorithm])}

    async def request(step: Step) -> dict[str, Any]:
        engine, slow = engines[step.engine], step.failure == SLOW
        failing = {"storage_tokens_per_second": 1} if slow else {"storage_failure": step.failure or None}
        before = pages_by_outcome(engine)
        await engine.post("/emulate", json=failing)
        answer = await (await engine.post("/generate", json=step.body)).json()
        info: dict[str, Any] = answer["meta_info"]
        outcome = "read" if slow else step.failure
        return info | {"failed_pages": (pages_by_outcome(engine) - before)[outcome]}

    steps = TRANSFERS if kind else (*STEPS, *FAILURES)[: len(recorded)]
    assert await play(request, steps) == recorded


@pytest.mark.parametrize(
    ("failure", "written", "read"),
    [
        (None, {"stored": 31}, {"read": 31, "stored": 15}),
        ("write_error", {"write_error": 31}, {"read": 31, "write_error": 15}),
        ("full", {"full": 31}, {"read": 31, "full": 15}),
        ("read_error", {"stored": 31}, {"read_error": 31, "present": 31, "stored": 15}),
        ("rejected", {"stored": 31}, {"rejected": 31, "stored": 46}),
    ],
)
async def test_failures_of_the_storage_are_misses_and_counted_by_the_plugins_metric(
    start: Start,
    extra_config: dict[str, Any],
    failure: str | None,
    written: dict[str, int],
    read: dict[str, int],
) -> None:
    """A greedy engine writes a prompt's pages while writes fail, and a longer prompt is read while reads fail."""
    flags = (*plugin(extra_config), "--page-size", "64")
    engines = [await start(*flags) for _ in range(3)]
    await engines[0].post("/emulate", json={"storage_failure": failure})
    await generate(engines[0], PROMPT)
    assert pages_by_outcome(engines[0]) == written
    if "stored" not in written:
        assert await cached(engines[1], PROMPT) == 0
    await engines[2].post("/emulate", json={"storage_failure": failure})
    assert await cached(engines[2], LONGER) == (1984 if "read" in read else 0)
    assert pages_by_outcome(engines[2]) == read


@pytest.mark.parametrize("page", [1, 64])
async def test_prompt_that_the_engine_has_in_memory_is_not_written_again(
    start: Start, extra_config: dict[str, Any], page: int
) -> None:
    """The last token of a prompt, and with it the last page, is always computed."""
    engine = await start(*plugin(extra_config), "--page-size", str(page))
    for _ in range(2):
        await generate(engine, PROMPT[: 10 * 64])
        assert pages_by_outcome(engine) == {"stored": 10 * 64 // page}


async def test_session_that_alternates_between_engines_finds_its_history_as_measured(start: Start) -> None:
    pools = [await start(*FILE, *ALGORITHMS[name]) for name in ("greedy", "NGRAM")]
    prompt, found = PROMPT, []
    for turn in range(4):
        answer = await generate(pools[turn % 2], prompt, tokens=32)
        found.append((answer["meta_info"]["cached_tokens"], len(prompt)))
        prompt = prompt + answer["output_ids"] + list(range(10_000 * turn, 10_000 * turn + 400))
    assert found == [(0, 2000), (2031, 2432), (2463, 2864), (2895, 3296)]


@pytest.mark.parametrize(("length", "found"), [(200, 0), (255, 0), (257, 256), (300, 299)])
async def test_missing_prefix_below_the_threshold_is_computed(start: Start, length: int, found: int) -> None:
    await generate(await start(*FILE), PROMPT[:length])
    assert await cached(await start(*FILE), PROMPT[:length]) == found


async def test_pages_are_shared_only_within_a_namespace(start: Start) -> None:
    writer, reader = await start(*FILE), await start(*FILE)
    await generate(writer, PROMPT, cache_salt="a")
    assert await cached(reader, PROMPT) == 0
    assert await cached(reader, PROMPT, cache_salt="b") == 0
    assert await cached(reader, PROMPT, cache_salt="a") == 1999


@pytest.mark.parametrize(
    "difference",
    [
        pytest.param(("--page-size", "16"), id="page-size"),
        pytest.param(("--kv-cache-dtype", "fp8_e5m2"), id="data-type"),
        pytest.param(("--model-path", "another"), id="model"),
    ],
)
async def test_engines_of_another_geometry_do_not_share_pages(
    start: Start, extra_config: dict[str, Any], difference: tuple[str, ...]
) -> None:
    await generate(await start(*plugin(extra_config)), PROMPT)
    assert await cached(await start(*plugin(extra_config), *difference), PROMPT) == 0


async def test_engines_with_another_secret_do_not_share_pages(
    start: Start, extra_config: dict[str, Any]
) -> None:
    await generate(await start(*plugin(extra_config)), PROMPT)
    write_secret(extra_config, "another secret of 32 bytes......")
    assert await cached(await start(*plugin(extra_config)), PROMPT) == 0


@pytest.mark.parametrize("secret_file", ["/no/such/file", "/dev/null"], ids=["absent", "empty"])
async def test_engine_without_the_secret_serves_without_sharing(
    start: Start, extra_config: dict[str, Any], capsys: pytest.CaptureFixture[str], secret_file: str
) -> None:
    engine = await start(*plugin(extra_config | {"secret_file": secret_file}))
    assert f"dps prefix cache: not shared: prefix cache: secret_file {secret_file}" in capsys.readouterr().err
    details = [(await generate(engine, PROMPT))["meta_info"]["cached_tokens_details"] for _ in range(2)]
    assert details == [None, {"device": 1999, "host": 0}]


async def test_deleted_directory_means_misses_until_pages_are_written_again(
    start: Start, tmp_path: Path
) -> None:
    await generate(await start(*FILE), PROMPT)
    shutil.rmtree(tmp_path / "pages")
    assert await cached(await start(*FILE), PROMPT) == 0
    assert await cached(await start(*FILE), PROMPT) == 1999


@pytest.fixture
def file_in_place_of_directory(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("not a directory")


@pytest.mark.usefixtures("file_in_place_of_directory")
@pytest.mark.parametrize("with_plugin", [False, True])
async def test_file_in_the_place_of_the_directory_means_misses(
    start: Start, extra_config: dict[str, Any], with_plugin: bool
) -> None:
    flags = plugin(extra_config) if with_plugin else FILE
    first, second = await start(*flags), await start(*flags)
    for engine in (first, second):
        assert await cached(engine, PROMPT) == 0
    assert (await generate(first, PROMPT))["meta_info"]["cached_tokens_details"]["device"] == 1999


@pytest.mark.parametrize(
    ("page", "length", "rate", "found", "read"),
    [
        pytest.param(64, 1000, 512, 0, 960, id="one batch"),
        pytest.param(1, 1000, 250, 256, 384, id="several batches"),
        pytest.param(1, 2000, 250, 256, 384, id="a longer prompt"),
        pytest.param(1, 2000, 150, 128, 256, id="a slower storage"),
    ],
)
async def test_slow_storage_delivers_the_batches_that_arrive_before_the_timeout_as_measured(
    start: Start, extra_config: dict[str, Any], page: int, length: int, rate: int, found: int, read: int
) -> None:
    """Eight threads of a real server each took 1, 0.03, 0.03 or 0.05 seconds per page. It also read the next batch."""
    slow = (
        *plugin(extra_config),
        *("--page-size", str(page)),
        *("--emulate-storage-tokens-per-second", str(rate)),
    )
    await generate(await start(*slow), PROMPT[:length])
    reader = await start(*slow)
    assert await cached(reader, PROMPT[:length]) == found
    assert pages_by_outcome(reader)["read"] == read // page


async def test_slow_storage_delivers_according_to_the_prefetch_policy(start: Start) -> None:
    slow = (*FILE, "--emulate-storage-tokens-per-second", "500")
    await generate(await start(*slow), PROMPT)
    limited, patient, hasty = [
        await start(*slow, "--hicache-storage-prefetch-policy", policy)
        for policy in ("timeout", "wait_complete", "best_effort")
    ]
    assert await cached(limited, PROMPT) == 640
    assert await cached(patient, PROMPT) == 1999
    assert await cached(hasty, PROMPT) == 0


async def test_transfer_and_refill_by_the_draft_model_take_time(
    start: Start, extra_config: dict[str, Any]
) -> None:
    flags = (*plugin(extra_config), "--emulate-storage-tokens-per-second", "10000")
    await generate(await start(*flags), PROMPT)
    seconds = {}
    for name in ("greedy", "STANDALONE"):
        info = (await generate(await start(*flags, *ALGORITHMS[name]), PROMPT))["meta_info"]
        assert info["storage_prefetch_wait"] == pytest.approx(1999 / 10_000)
        seconds[name] = info["first_token_latency"] - info["storage_prefetch_wait"]
    assert seconds["greedy"] == pytest.approx(0.0081 + 1 / 11_000)
    assert seconds["STANDALONE"] == pytest.approx(
        seconds["greedy"] + (0.0022 / 0.0081) * (0.0081 + 2000 / 11_000)
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 600}], "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x " * 600, "max_tokens": 1}),
    ],
    ids=["chat", "completions"],
)
async def test_sources_of_cached_tokens_are_reported_if_requested(
    start: Start, path: str, body: dict[str, Any], stream: bool
) -> None:
    await (await start(*FILE)).post(path, json=body)
    reader = await start(*FILE)

    async def extensions(**fields: Any) -> list[Any]:
        text = await (await reader.post(path, json={**body, **fields, "stream": stream})).text()
        lines = text.removesuffix("data: [DONE]\n\n").split("\n\n") if stream else [text]
        documents = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        return [document["sglext"] for document in documents if "sglext" in document]

    (first,) = await extensions(return_cached_tokens_details=True)
    (second,) = await extensions(return_cached_tokens_details=True)
    found = first["cached_tokens_details"].pop("storage")
    assert found > 256
    assert first == {"cached_tokens_details": {"device": 0, "host": 0, "storage_backend": "HiCacheFile"}}
    again = {"device": found, "host": 0, "storage": 0, "storage_backend": "HiCacheFile"}
    assert second == {"cached_tokens_details": again}
    assert await extensions() == []


async def test_metrics_count_cached_tokens_by_source(start: Start) -> None:
    await generate(await start(*FILE), PROMPT)
    reader = await start(*FILE)
    for _ in range(2):
        await generate(reader, PROMPT)
    assert counted(reader, "sglang:cached_tokens", "cache_source") == {"storage": 1999, "device": 1999}


def counted(engine: Client, name: str, label: str) -> Counter[str]:
    """The samples of a counter by a label."""
    app = engine.app
    assert app is not None
    return Counter(
        {
            sample.labels[label]: int(sample.value)
            for family in text_string_to_metric_families(app[ENGINE].metrics.exposition().decode())
            for sample in family.samples
            if sample.name == f"{name}_total"
        }
    )


def pages_by_outcome(engine: Client) -> Counter[str]:
    """The plugin's metric."""
    return counted(engine, "dps_prefix_cache_pages", "outcome")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--page-size 0", "--page-size 0 must be a positive integer"),
        (
            "--enable-hierarchical-cache --hicache-storage-backend file --hicache-write-policy write_back",
            "--hicache-write-policy write_back is not emulated; use write_through",
        ),
        (
            "--enable-hierarchical-cache --hicache-storage-backend file --hicache-storage-prefetch-policy soon",
            "choose one of best_effort, wait_complete, timeout",
        ),
        (
            "--enable-hierarchical-cache --hicache-storage-backend dynamic "
            "--hicache-storage-backend-extra-config {}",
            "prefix cache: interface_v1 must be 1",
        ),
        (
            "--enable-hierarchical-cache --hicache-storage-backend dynamic "
            "--hicache-storage-backend-extra-config @missing",
            "@missing: .*No such file",
        ),
    ],
)
def test_invalid_settings_are_refused(flags: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of(*flags.split())
    assert re.search(complaint, capsys.readouterr().err)
