"""The OpenAPI description that a gateway serves is true: of answers, streams and errors, and of fuzzed requests."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import schemathesis
from schemathesis.schemas import BaseSchema

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from tests.gateway.openapi_checks import CHECKS, answer
from tests.integration.leftovers import settled

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, GENERATE = "/v1/responses", "/generate"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 4},
    MESSAGES: {"model": MODEL, "messages": HELLO, "max_tokens": 4},
    RESPONSES: {"model": MODEL, "input": "hello", "max_output_tokens": 4},
    GENERATE: {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
}
KEY, LIMITED = "sk-test", "sk-limited"
FUZZING_SECONDS = 200
GROWTH_BYTES = 8 * 2**20
"""Bounds what the same requests, about 1,100, may add to the memory the second time; a decision takes about 1 KB."""
FEW = 10
"""Bounds the connections to engines and the metric series that they may add, which depend on the time."""
EXAMPLES = 4
"""Fuzzed requests for each operation, besides those that are derived from its description."""


@dataclass(frozen=True)
class DescribedGateway:
    """A gateway and the description that it serves."""

    gateway: Gateway
    engines: list[Engine]
    schema: BaseSchema

    async def answer(
        self,
        path: str,
        body: Any = None,
        key: str = KEY,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        **parameters: str,
    ) -> schemathesis.Response:
        """The response to a request, after it has been compared with the description."""
        operation = self.schema[path][method or ("GET" if body is None else "POST")]
        headers = {"Authorization": f"Bearer {key}"} | (headers or {})
        options: dict[str, Any] = {"headers": headers, "path_parameters": parameters}
        return await asyncio.to_thread(answer, operation, self.gateway.url, body, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def described(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DescribedGateway]:
    folder = tmp_path_factory.mktemp("openapi")
    keys = folder / "keys"
    keys.write_text(f"team:{KEY}\nteam:{LIMITED} models=other\n")
    sections: dict[str, dict[str, Any]] = {
        "auth": {"keysFile": str(keys)},
        "limits": {"maxBodyBytes": 100_000},
    }
    async with LocalProcesses(folder) as processes:
        engines = await processes.start_engines(
            "speculative",
            "greedy",
            arguments=("--emulate-speed", "2000", "--enable-response-store"),
        )
        gateway = await processes.start_gateway(engines[:1], engines[1:], sections)
        schema = await asyncio.to_thread(schemathesis.openapi.from_url, f"{gateway.url}/openapi.json")
        yield DescribedGateway(gateway, engines, schema)


@pytest.mark.parametrize("path", BODIES)
async def test_answers_are_as_described(described: DescribedGateway, path: str) -> None:
    response = await described.answer(path, BODIES[path])
    assert (response.status_code, response.headers["content-type"]) == (200, ["application/json"])
    again = await described.answer(path, BODIES[path], headers={"x-session-id": path})
    assert (again.status_code, again.headers["x-dps-turn"]) == (200, ["1"])


@pytest.mark.parametrize("path", BODIES)
async def test_events_of_streams_are_as_described(described: DescribedGateway, path: str) -> None:
    response = await described.answer(path, BODIES[path] | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_error_event_is_as_described(described: DescribedGateway, path: str) -> None:
    for engine in described.engines:
        await engine.emulate(disconnect_after_chunks=3)  # after the first content
    not_continued = {"logprobs": True, "return_logprob": True}  # by the other engine
    response = await described.answer(path, BODIES[path] | {"stream": True, **not_continued})
    for engine in described.engines:
        await engine.emulate()
    assert b"upstream_broken" in response.content


@pytest.mark.parametrize("path", BODIES)
async def test_errors_are_as_described(described: DescribedGateway, path: str) -> None:
    long = BODIES[path] | {"user": "x" * 200_000}
    unknown = BODIES[path] | {"model": "unknown"}
    responses = [
        await described.answer(path, []),
        await described.answer(path, BODIES[path], key="sk-wrong"),
        await described.answer(path, BODIES[path], key=LIMITED),
        await described.answer(path, unknown),
        await described.answer(path, long),
        await described.answer(path, {"messages": 1, "prompt": {}, "text": {}, "input": 1}),
        await described.answer(path, BODIES[path], headers={"x-envoy-upstream-rq-timeout-ms": "x"}),
    ]
    assert [response.status_code for response in responses] == [400, 401, 403, 404, 413, 400, 400]


async def test_relayed_requests_are_as_described(described: DescribedGateway) -> None:
    created = (await described.answer(RESPONSES, BODIES[RESPONSES])).json()["id"]
    responses = [
        await described.answer("/v1/models"),
        await described.answer("/v1/models/{model}", model=MODEL),
        await described.answer("/v1/models/{model}", model="unknown"),
        await described.answer("/v1/messages/count_tokens", BODIES[MESSAGES]),
        await described.answer("/v1/messages/count_tokens", {}),
        await described.answer("/v1/responses/{id}", id=created),
        await described.answer("/v1/responses/{id}", id="unknown"),
        await described.answer("/v1/responses/{id}/cancel", method="POST", id="unknown"),
        await described.answer("/v1/{rest}", rest="loads"),
        await described.answer("/v1/{rest}", {"input": "hello"}, rest="embeddings"),
        await described.answer("/v1/{rest}", method="DELETE", rest="nothing"),
        await described.answer("/model_info"),
        await described.answer("/server_info"),
        await described.answer("/health_generate"),
        await described.answer("/model_info", key="sk-wrong"),
    ]
    statuses = [200, 200, 404, 200, 400, 200, 404, 404, 200, 400, 404, 200, 200, 200, 401]
    assert [response.status_code for response in responses] == statuses


@pytest.mark.parametrize("path", ["/health", "/version", "/openapi.json"])
async def test_answers_of_the_gateway_are_as_described_and_need_no_key(
    described: DescribedGateway, path: str
) -> None:
    assert (await described.answer(path, key="sk-wrong")).status_code == 200


async def test_fuzzed_requests_cause_no_server_error_and_leave_nothing_behind(
    described: DescribedGateway, tmp_path: Path
) -> None:
    await fuzz(described.gateway, tmp_path)
    await settled(described.gateway, *described.engines)
    before = await left_by_requests(described.gateway)
    await fuzz(described.gateway, tmp_path)
    await settled(described.gateway, *described.engines)
    after = await left_by_requests(described.gateway)
    assert after.open_files - before.open_files < FEW
    assert after.metric_series - before.metric_series < FEW
    assert after.resident_bytes - before.resident_bytes < GROWTH_BYTES
    assert "Traceback" not in described.gateway.child.log.read_text()


@dataclass(frozen=True)
class Footprint:
    """What a gateway process holds while it serves no request."""

    resident_bytes: int
    open_files: int
    metric_series: int


def resident_bytes(pid: int) -> int:
    """The resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def left_by_requests(gateway: Gateway) -> Footprint:
    async with aiohttp.ClientSession() as http, http.get(f"{gateway.admin}/metrics") as response:
        metrics = await response.text()
    return Footprint(
        resident_bytes(gateway.child.pid),
        len(os.listdir(f"/proc/{gateway.child.pid}/fd")),
        sum(not line.startswith("#") for line in metrics.splitlines()),
    )


async def fuzz(gateway: Gateway, folder: Path) -> None:
    """Send the requests that schemathesis derives from the description. They are the same each time."""
    settings = folder / "schemathesis.toml"
    # A request may set a time limit that is over before an engine can answer.
    settings.write_text('[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "504"]\n')
    checks = ["not_a_server_error", *(each.__name__ for each in CHECKS)]
    command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(settings), "run"]
    command += [f"{gateway.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"]
    command += ["--checks", ",".join(checks), "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
    command += ["--generation-deterministic", "--request-timeout", "60", "--no-color"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(FUZZING_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
