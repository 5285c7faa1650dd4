"""The page on the admin port in Chromium, against a local stack under load. It makes the documentation's screenshots.

The images are written to build/e2e/page; copy those that have changed to docs/images.
"""

import asyncio
import itertools
import json
import shutil
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.run import replay
from dps_lab.replay.source import load_source
from dps_local.assets import cached, only_file, qwen_tokenizer, run_client
from dps_local.processes import get_if_ok
from dps_local.stack import LocalStack, StackOptions
from dps_testkit.paths import ROOT
from dps_testkit.waiting import wait_until
from e2e.page.chromium import Page

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

AXE_VERSION = "4.14.1"
IMAGES = ROOT / "build/e2e/page"
VIEWS = ("now", "growth", "sessions", "what-if", "health")
REPLAYS = itertools.count()
THRESHOLD = 20
"""Almost all turns are longer."""
ROWS = "document.querySelectorAll('#decisions tr.decision')"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[LocalStack]:
    options = StackOptions(
        qwen_tokenizer().path, gateways=2, prefix_cache="common", policy="Adaptive", speed=2.0
    )
    async with LocalStack(options) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    IMAGES.mkdir(parents=True, exist_ok=True)
    async with Page(tmp_path_factory.mktemp("chromium") / "profile") as page:
        await page.resize(1280, 800)
        await page.open(f"{stack.admin_urls[0]}/?gateways={stack.admin_urls[1]}")
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def load(stack: LocalStack) -> AsyncIterator[None]:
    """Sessions are replayed during a test. Their ids begin with `agent-`."""
    sessions = [
        session.model_copy(
            update={"turns": [turn.model_copy(update={"max_tokens": 40}) for turn in session.turns]}
        )
        for session in load_source("bfcl")[1][:60]
    ]
    options = ReplayOptions(urls=stack.urls, model=stack.options.model, extra_body={"ignore_eos": True})

    async def repeat() -> None:
        for number in REPLAYS:
            await replay(sessions, replace(options, run=f"agent-{number}-"), concurrency=4)

    task = asyncio.create_task(repeat())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def show(page: Page, view: str, argument: str = "") -> None:
    """Select a view with the keyboard, as far as it has no argument."""
    if argument:
        await page.evaluate(f"location.hash = {json.dumps(f'#{view}={argument}')}")
    else:
        await page.evaluate(f"document.querySelector('nav a[href=\"#{view}\"]').focus()")
        await page.press("Enter")
    await page.wait(f"!document.querySelector('#view-{view}').hidden", f"the view {view} is shown")


async def test_empty_page_has_a_command_that_works(page: Page, stack: LocalStack) -> None:
    await page.wait("!document.querySelector('#empty').hidden", "the command is shown")
    command = await page.evaluate("document.querySelector('#command').textContent")
    assert command.startswith(f"curl {stack.urls[0]}/chat/completions")
    curl = await asyncio.create_subprocess_shell(f"{command} --silent", stdout=asyncio.subprocess.PIPE)
    answer, _ = await curl.communicate()
    assert json.loads(answer)["usage"]["completion_tokens"] == 8
    await page.wait(
        f"{ROWS}.length === 1 && document.querySelector('#empty').hidden", "the decision is shown"
    )


async def test_decisions_appear_with_their_inputs(page: Page, load: None) -> None:
    await page.wait(f"{ROWS}.length >= 30", "decisions are shown")
    cells = await page.rows("#decisions tr.decision")
    turn = next(row for row in cells if row[1].startswith("agent-") and row[2] != "1")
    assert turn[5] in ("speculative", "greedy")
    assert turn[7] in ("predicted_faster", "fixed")
    assert turn[-1] == "complete"
    assert "–" not in (turn[3], turn[4], turn[8], turn[10], turn[12], turn[14], turn[15])
    await page.evaluate("document.querySelector('#pause').click()")
    await page.evaluate("document.querySelector('#decisions tr.decision button').focus()")
    await page.press("Enter")
    details = await page.evaluate("document.querySelector('#decisions tr.inputs').textContent")
    assert "uncached tokens" in details
    assert "queued prefill tokens" in details
    await page.screenshot(IMAGES / "page-decision.png")
    await page.press("Enter")
    assert await page.evaluate("document.querySelector('#decisions tr.inputs')") is None
    await page.evaluate("document.querySelector('#pause').click()")
    await page.resize(1560, 720)
    await page.wait(f"{ROWS}.length > 50", "more decisions are shown")
    await page.screenshot(IMAGES / "page.png")
    await page.resize(1280, 800)


async def test_session_is_found_by_the_id_of_its_client(page: Page, load: None) -> None:
    session = await page.evaluate(
        f"[...{ROWS}].find((row) => row.cells[2].textContent > 3).querySelector('a').title"
    )
    await show(page, "sessions")
    await page.evaluate("document.querySelector('#session').focus()")
    await page.send("Input.insertText", text=session)
    await page.press("Enter")
    await page.wait("document.querySelectorAll('#turns tbody tr').length >= 4", "its turns are shown")
    rows = [[row[0], row[4]] for row in await page.rows("#turns tbody tr")]
    assert rows[:3] == [["1", "new"], ["2", "grown"], ["3", "grown"]]
    phases = "[...document.querySelectorAll('#progress tbody tr')].map((row) => row.cells[1].textContent)"
    await page.screenshot(IMAGES / "page-session.png")
    await page.evaluate("location.hash = '#sessions'")
    await page.wait(f"{phases}.includes('decoding')", "requests in progress are shown")


async def test_growth_is_drawn_with_the_threshold(page: Page, load: None) -> None:
    await show(page, "growth")
    await page.wait("document.querySelectorAll('#view-growth circle').length > 10", "predictions are drawn")
    assert await page.evaluate("document.querySelector('.threshold-label').textContent") == "τ = 128"
    await page.resize(1280, 950, dark=True)
    await asyncio.sleep(1)
    await page.screenshot(IMAGES / "page-growth.png")
    await page.resize(1280, 800)


async def test_other_policies_are_simulated(page: Page) -> None:
    await show(page, "what-if")
    await page.evaluate("document.querySelector('#policy').value = 'AlwaysGreedy'")
    await page.evaluate("document.querySelector('#simulate').requestSubmit()")
    await page.wait("document.querySelector('#result table') !== null", "the result is shown")
    figures = {row[0]: row[1:] for row in await page.rows("#result tbody tr")}
    assert figures["speculative turns"][1] == "0 %"
    await page.screenshot(IMAGES / "page-what-if.png")


async def test_new_threshold_is_visible_at_once(page: Page, stack: LocalStack, load: None) -> None:
    file = stack.folder / "gateway-1.yaml"
    configuration = yaml.safe_load(await asyncio.to_thread(file.read_text))
    configuration["routing"] |= {"policy": "DeltaPrefill", "thresholdTokens": THRESHOLD}
    await asyncio.to_thread(file.write_text, yaml.safe_dump(configuration))
    changed = time.monotonic()
    shown = f"document.querySelector('#status').textContent.includes('τ = {THRESHOLD}')"
    await page.wait(shown, "the threshold is shown")
    print(f"shown {time.monotonic() - changed:.1f} s after the change of the file")
    await asyncio.to_thread(file.write_text, "routing: {thresholdTokens: -1}")
    await page.wait("document.querySelector('#status').textContent === 'configuration refused'", "refusal")
    await show(page, "health")
    assert "thresholdTokens" in await page.evaluate("document.querySelector('#view-health').textContent")
    await page.screenshot(IMAGES / "page-health.png")
    await asyncio.to_thread(file.write_text, yaml.safe_dump(configuration))


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed, from which axe-core comes")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
async def test_page_is_accessible(page: Page, load: None, width: int, dark: bool) -> None:
    axe = await asyncio.to_thread((cached(f"axe-core-{AXE_VERSION}", _fetch_axe) / "axe.min.js").read_text)
    await page.evaluate(f"{axe}\n0")
    await page.resize(width, 800, dark=dark)
    for view in VIEWS:
        await show(page, view)
        await asyncio.sleep(0.6)
        report: dict[str, Any] = await page.evaluate("axe.run({resultTypes: ['violations']})")
        serious = [each for each in report["violations"] if each["impact"] in ("serious", "critical")]
        assert [(each["id"], [node["html"] for node in each["nodes"][:3]]) for each in serious] == []
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    if width == 390 and dark:
        await show(page, "now")
        await page.screenshot(IMAGES / "page-phone.png")


async def test_killed_replica_is_visible_at_once(page: Page, stack: LocalStack, load: None) -> None:
    await show(page, "now")
    states = "[...document.querySelectorAll('#pools tbody tr')].map((row) => row.cells[1].textContent)"
    both = f"{states}.filter((state) => state === 'ready').length === 2"
    await page.wait(both, "both replicas are ready")
    stack.engines["greedy"].kill()

    async def gateway_knows() -> bool:
        pools = json.loads(await get_if_ok(f"{stack.admin_urls[0]}/pools") or b"{}")
        return bool(pools) and pools["greedy"]["readyReplicas"] == 0

    killed = time.monotonic()
    await wait_until(gateway_knows, "the gateway knows")  # at once, if requests wait for the replica
    known = time.monotonic()
    failed = f"{states}.includes('unavailable') && {states}.includes('0 of 1 ready')"
    await page.wait(failed, "the failure is shown")
    print(f"known {known - killed:.1f} s after the kill, shown {time.monotonic() - known:.1f} s later")


async def test_nothing_is_loaded_from_elsewhere_and_nothing_fails(page: Page, stack: LocalStack) -> None:
    assert page.problems == []
    assert f"{stack.admin_urls[1]}/live" in page.requests
    own = tuple(f"{url}/" for url in stack.admin_urls)
    assert [url for url in page.requests if not url.startswith(own)] == []


async def test_password_is_asked_for(page: Page, stack: LocalStack, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    file = stack.folder / "gateway-1.yaml"
    configuration = yaml.safe_load(await asyncio.to_thread(file.read_text))
    configuration["listen"]["adminTokenFile"] = str(token)
    await asyncio.to_thread(file.write_text, yaml.safe_dump(configuration))
    if stack.engines["greedy"].ended:
        stack.engines["greedy"].start()
    stack.gateways[0].kill()
    await stack.start_gateway(0)
    async with aiohttp.ClientSession() as http, http.get(stack.admin_urls[0]) as response:
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, 'Basic realm="DPS Router"')
    await page.open(stack.admin_urls[0].replace("//", "//user:secret@") + "/")
    shown = "document.querySelector('#status')?.textContent.includes('τ')"
    await page.wait(shown, "the state is shown")


def _fetch_axe(scratch: Path, target: Path) -> None:
    run_client(["npm", "pack", "--silent", f"axe-core@{AXE_VERSION}"], scratch)
    with tarfile.open(only_file(scratch, "*.tgz")) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        (target / "axe.min.js").write_bytes(member.read())
