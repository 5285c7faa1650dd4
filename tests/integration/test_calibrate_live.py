"""`dps calibrate` on running engines: emulated ones, and servers that cannot be measured."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_lab.calibrate.cli import main
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS
from dps_local.processes import free_ports
from dps_testkit.documents import run_by
from dps_testkit.processes import LocalProcesses

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE = [
    {
        "id": f"s{number}",
        "turns": [{"prompt_tokens": 400 + 80 * turn, "output_tokens": 20} for turn in range(3)],
    }
    for number in range(6)
]


SPEED = ("--emulate-speed", "50")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def urls(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, str]]:
    """The URLs of a speculative and a greedy engine."""
    async with LocalProcesses(tmp_path_factory.mktemp("calibrate")) as processes:
        (speculative,), (greedy,) = await asyncio.gather(
            processes.start_engines(
                "speculative", arguments=("--speculative-algorithm", "STANDALONE", *SPEED)
            ),
            processes.start_engines("greedy", arguments=SPEED),
        )
        yield {"speculative": speculative.url, "greedy": greedy.url}


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return path


@pytest.fixture
def workload(trace_file: Path) -> list[str]:
    return ["--workload", str(trace_file), "--concurrency", "2"]


async def test_the_documented_command_measures_running_engines(
    trace_file: Path, urls: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = run_by(Path(__file__))
    actual = {
        "trace.jsonl": str(trace_file),
        "http://127.0.0.1:30000": urls["speculative"],
        "http://127.0.0.1:30001": urls["greedy"],
    }
    dps, calibrate, *options = (
        actual.get(word, word) for word in shlex.split(block.text.replace("\\\n", ""))
    )
    assert (dps, calibrate) == ("dps", "calibrate")
    assert await asyncio.to_thread(main, options) == 0
    printed = capsys.readouterr().out
    assert "Measured engines" in printed
    assert "Two pools" in printed


async def test_the_measured_parameters_are_printed(
    workload: list[str], urls: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    speculative, greedy = (urls[pool] for pool in ("speculative", "greedy"))
    options = ["--speculative-url", speculative, "--greedy-url", f"{greedy}/v1", "--greedy-url", greedy]
    assert await asyncio.to_thread(main, [*workload, *options, "--json"]) == 0
    printed = capsys.readouterr()
    assert "each engine receives 52 requests, up to 16 at the same time, for at most 120 s" in printed.err
    measured = json.loads(printed.out)["engines"]
    keys = {"passes", "request_seconds", "acceptance_length", "serialized"}
    assert {pool: set(each) for pool, each in measured.items()} == {"speculative": keys, "greedy": keys}
    # Counts do not depend on how fast the engines and this process run, unlike durations.
    accepted = {pool: each["acceptance_length"] for pool, each in measured.items()}
    expected = {"speculative": SPECULATION_DEFAULTS["STANDALONE"].acceptance_length, "greedy": 1.0}
    assert accepted == pytest.approx(expected, rel=0.15)
    for each in measured.values():
        assert each["passes"]["decode_base_seconds"] + each["passes"]["decode_seconds_per_request"] > 0


async def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `dps calibrate` prints instead of a calibration."""
    assert await asyncio.to_thread(main, arguments) == 2
    return capsys.readouterr().err


async def test_an_engine_that_cannot_be_reached_is_named(
    workload: list[str], urls: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    printed = await refusal(
        [*workload, "--speculative-url", urls["speculative"], "--greedy-url", url], capsys
    )
    assert f"the greedy engine at {url} does not answer" in printed
    assert "check that it runs, and that --greedy-url is its base URL" in printed


async def test_both_kinds_of_engine_are_required(
    workload: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = await refusal([*workload, "--greedy-url", "http://127.0.0.1:1"], capsys)
    assert "set both --speculative-url and --greedy-url" in printed


MODELS = {"data": [{"id": "m", "max_model_len": 4096}]}


@pytest.mark.parametrize(
    ("models", "chat", "message"),
    [
        (web.Response(status=401), None, "answers with status 401; set --api-key"),
        (web.Response(status=404), None, "answers /v1/models with status 404 and no list of models"),
        (web.json_response([]), None, "answers /v1/models with status 200 and no list of models"),
        (
            web.json_response(MODELS),
            web.Response(status=400, text="too long"),
            "answers with status 400: too long",
        ),
        (web.json_response(MODELS), web.Response(text="data: [DONE]\n\n"), "its answers have no text"),
        (web.json_response(MODELS), web.Response(text="data: {}\n\n"), "does not answer: the stream ended"),
    ],
    ids=["key required", "another server", "no models", "refused", "no text", "broken stream"],
)
async def test_servers_that_cannot_be_measured_are_refused(
    models: web.Response,
    chat: web.Response | None,
    message: str,
    workload: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return models if request.method == "GET" or chat is None else chat

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        printed = await refusal([*workload, "--speculative-url", url, "--greedy-url", url], capsys)
    assert f"the speculative engine at {url}" in printed
    assert message in printed
