"""The documentation is correct: its commands run, its configuration is valid, its links lead somewhere."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import IO

import pytest

from dps_gateway.config import parse_config
from dps_local.assets import bundled_tokenizer, qwen_tokenizer
from dps_local.processes import free_ports, next_free_ports
from dps_testkit.documents import DOCUMENTS, Block, all_blocks, blocks, run_by
from dps_testkit.http import status_of
from dps_testkit.paths import ROOT
from dps_testkit.processes import LocalProcesses
from dps_testkit.waiting import eventually_async

SHELL = {"sh", "bash", "shell", "console"}
HERE = Path(__file__)
SERVER = re.compile(r"\bdps (?:up\b|gateway\b(?!.*--check))")
"""A command that serves until it is interrupted."""
COMMAND_SECONDS = 120.0
START_SECONDS = 180.0
"""The time limit is long, because the commands start up to four processes and the machine may be busy."""
GATEWAY_PORT = "8000"
VOLATILE = {"x-request-id", "x-dps-session", "date"}
"""Headers whose value differs in every run."""
DEPENDENT_ON_TOKENIZER = {"x-dps-prompt-tokens", "x-dps-delta-tokens"}
"""Headers whose value in the documents is for Qwen's tokenizer."""


class Sandbox:
    """A folder in which a document's commands run in order, on free ports instead of the document's.

    A block that starts a server runs in the background until the next such block, or the end.
    """

    def __init__(self, folder: Path, engines: Mapping[str, int]) -> None:
        first = next_free_ports(20_000, 2)
        ports = free_ports(3)
        self._ports = {"8000": first, "8001": first + 1, "9090": ports[0]} | {
            port: engines.get(port, free) for port, free in zip(("30000", "30001"), ports[1:], strict=True)
        }
        self._folder = folder
        self._server: asyncio.subprocess.Process | None = None
        self.output = ""
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "tokenizer").symlink_to(bundled_tokenizer())

    def write(self, name: str, text: str) -> None:
        """Write a file for later commands. A JSON object in a .jsonl file is joined into one line."""
        if name.endswith(".jsonl"):
            text = json.dumps(json.loads(text)) + "\n"
        (self._folder / name).write_text(self._on_free_ports(text))

    async def run(self, text: str) -> None:
        """Run commands to their end, or until the server that they start answers."""
        if SERVER.search(text.splitlines()[-1]):
            await self._serve(text)
        else:
            await self._finish(text)

    async def _serve(self, text: str) -> None:
        await self.aclose()
        port = self._ports[GATEWAY_PORT]
        log = self._folder / "server.log"
        with log.open("w") as output:
            server = self._server = await self._start(
                text.replace("dps up", f"dps up --port {GATEWAY_PORT}"), output=output
            )

        async def ready() -> None:
            printed = log.read_text()
            if server.returncode is not None:
                pytest.fail(f"ended with status {server.returncode}: {text}\n{printed}")
            # A gateway already answers when one of its pools is ready, and then sends every turn there.
            if "dps up" in text:
                assert "Press Ctrl-C" in printed, printed
            assert await status_of(f"http://127.0.0.1:{port}/v1/models") == 200, text

        await eventually_async(ready, START_SECONDS)

    async def _finish(self, text: str) -> None:
        process = await self._start(text, output=asyncio.subprocess.PIPE)
        async with asyncio.timeout(COMMAND_SECONDS):
            output, _ = await process.communicate()
        self.output = output.decode()
        assert process.returncode == 0, f"{text}\n{self.output}"

    async def _start(self, text: str, output: int | IO[str]) -> asyncio.subprocess.Process:
        search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c", self._on_free_ports(text)),
            cwd=self._folder,
            env={**os.environ, "PATH": search_path},
            start_new_session=True,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def aclose(self) -> None:
        """Stop the server."""
        if self._server is not None and self._server.returncode is None:
            os.killpg(self._server.pid, signal.SIGTERM)
            await self._server.wait()
        self._server = None

    def _on_free_ports(self, text: str) -> str:
        return re.sub(r"\b(8000|8001|9090|30000|30001)\b", lambda match: str(self._ports[match[0]]), text)


def documents_run_here() -> list[str]:
    return sorted({block.document for block in run_by(HERE)})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", documents_run_here())
async def test_commands_succeed_and_print_the_documented_output(document: str, tmp_path: Path) -> None:
    found = blocks(document)
    async with LocalProcesses(tmp_path) as processes:
        existing: dict[str, int] = {}
        if any("--speculative-url" in block.text for block in found if block.runner):
            engines = await processes.start_engines("speculative", "greedy")
            urls = zip(("30000", "30001"), engines, strict=True)
            existing = {port: int(engine.url.rpartition(":")[2]) for port, engine in urls}
        folder = tmp_path / "sandbox"
        folder.mkdir()
        async with aclosing(Sandbox(folder, existing)) as sandbox:
            for block in found:
                if block.file:
                    sandbox.write(block.file, block.text)
            for block in found:
                if block.runner == str(HERE.relative_to(ROOT)):
                    await sandbox.run(block.text.rstrip())
                elif block.marker == "output":
                    assert_printed(block, sandbox.output)


def assert_printed(block: Block, output: str) -> None:
    """Every line of the block is in the output; of headers that vary, only the name."""
    printed = output.replace("\r", "").splitlines()
    varying = VOLATILE | (DEPENDENT_ON_TOKENIZER if qwen_tokenizer().path == bundled_tokenizer() else set())
    for line in block.text.splitlines():
        name, _, _ = line.partition(": ")
        if name.lower() in varying:
            assert any(other.startswith(f"{name}: ") for other in printed), f"{block}: {name}"
        else:
            assert line in printed, f"{block}: {line}"


@pytest.mark.parametrize("block", [block for block in all_blocks() if block.language in SHELL], ids=str)
def test_every_command_block_is_run_or_marked_with_a_reason(block: Block) -> None:
    if block.runner is not None:
        runner = ROOT / block.runner
        assert runner.is_file()
        calls = [name for name in ("run_by(", "run_documented(") if name in runner.read_text()]
        assert calls or runner.suffix != ".py", f"{runner} calls neither run_by() nor run_documented()"
    else:
        assert block.reason_not_run, f"{block}: mark it with 'run by PATH' or 'not run: REASON'"


def links() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target:
                yield document, target


@pytest.mark.parametrize(("document", "target"), list(links()))
def test_a_link_leads_to_a_file_and_a_heading(document: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (ROOT / document).parent / path if path else ROOT / document
    assert file.exists()
    if anchor:
        headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def configuration_files() -> dict[str, str]:
    return {block.file: block.text for block in blocks("docs/gateway.md") if block.file}


@pytest.mark.parametrize("name", configuration_files())
def test_documented_gateway_configuration_is_valid(name: str) -> None:
    parse_config(configuration_files()[name], source=name, environment={})
