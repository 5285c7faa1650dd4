"""Real SGLang in pods of a DPSRouter whose pools share a prefix cache, while its storage and its engines fail.

Sessions change pools on every turn. No request fails, all answers are those of a greedy engine alone, and after each
fault the pools share pages again. Only streams that have begun are interrupted if their engine is killed.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count, pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_local.stack import MODEL as SERVED_NAME
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.http import status_of
from dps_testkit.waiting import PATIENCE_SECONDS, eventually, eventually_async, wait_until
from e2e.node import halting, sglang_router, storage_faults
from e2e.node.containers import kill, until_restarted
from e2e.node.mounts import LOAD_SECONDS, load_image
from e2e.node.sessions import alternating, turns
from e2e.node.sglang_router import PORT, ROUTER
from e2e.node.streams import LongStream
from e2e.prefix_cache import hicache
from e2e.prefix_cache.alternation import (
    LONG,
    SHORT,
    answers,
    cached_at_first,
    cached_share,
    check,
    check_answers,
    fewer_sessions,
    lacking,
    sessions,
)
from e2e.prefix_cache.sessions import Session, play
from e2e.prefix_cache.shared_servers import FETCH_THRESHOLD
from e2e.real_sglang.local_sglang import tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

DISK = 256 * 2**20
"""The size of the volume, twice the size limit of all pages."""
ATTEMPTS = 3
"""Rounds of sessions after a fault, in one of which the pools must share pages. A busy machine may exceed SGLang's time
limit for fetches, so the first one may fail."""
QUESTIONS = dict(zip(("greedy", "speculative"), alternating(2), strict=True))
"""For each pool, a first question that is routed to it."""


@dataclass(frozen=True)
class Fleet:
    """A DPSRouter that is ready, and the URLs of its gateway and of the engine of each pool.

    pages: the directory of the prefix cache. requests: for each pool, the folder with requests to halt. unmoved:
    sessions that were played on the greedy engine alone.
    """

    node: Cluster
    kube: Kube
    gateway: str
    engines: Mapping[str, str]
    pages: Path
    requests: Mapping[str, Path]
    unmoved: Sequence[Session]

    async def play(self, played: Sequence[Session]) -> Sequence[Session]:
        """Play sessions that change pools on every turn. Fails if a request fails or an answer is wrong."""
        await play(played, self.gateway, {})
        check_answers(played, self.unmoved)
        return played

    async def play_until(self, ended: asyncio.Event, salt: str) -> Sequence[Session]:
        """Play sessions of all kinds again and again until the event is set. They continue after an error event."""
        played: list[Session] = []
        while not ended.is_set():
            played += await self.play(sessions(f"{salt} {len(played)}", persistent=True))
        return played

    async def recover(self, fault: str, played: Sequence[Session], error_events: int = 0) -> None:
        """Play sessions until the pools share pages, and print a row of the table in docs/faults.md.

        played: the sessions during the fault. error_events: streams that ended with one. Fails if a request fails or
        an answer is wrong in any round.
        """
        for attempt in range(ATTEMPTS):
            after = fewer_sessions(f"after {fault} {attempt}")
            await play(after, self.gateway, self.engines)
            check_answers(after, self.unmoved)
            if lacking(after, self.unmoved) <= PAGE_TOKENS + FETCH_THRESHOLD:
                break
        check(after, self.unmoved)
        during, afterwards = (f"{cached_share(each, self.unmoved):.0%}" for each in (played, after))
        number = sum(len(session.turns) for session in (*played, *after))
        print(f"| {fault} | {number} | 0 | 0 | {error_events} | {during} | {afterwards} | {attempt + 1} |")

    def stored(self) -> Mapping[Path, bytes]:
        """The digest of each stored page."""
        return {page: sha256(page.read_bytes()).digest() for page in self.pages.glob("*/*/*.page")}

    def engine_pod(self, pool: str) -> Manifest:
        """The pod of a pool's only engine."""
        (pod,) = self.kube.list("pod", f"dpsrouter.io/router={ROUTER},dpsrouter.io/component={pool}")
        return pod

    def restarted(self, pod: Manifest, pool: str) -> None:
        """Wait until a killed engine serves again, through its Service too, and the gateway sends it requests."""
        until_restarted(self.kube, pod, LOAD_SECONDS)
        attempts = count(1)

        def routed() -> None:
            # Each attempt is a new session. Repeated, the prompt would have grown by nothing, and be routed by that.
            system = f"You are brief. This is attempt {next(attempts)}."
            (first,) = turns(self.gateway, SERVED_NAME, [QUESTIONS[pool]], system=system)
            assert first.pool == pool
            assert asyncio.run(status_of(f"{self.engines[pool]}/health")) == 200

        eventually(routed)


@pytest.fixture(scope="module")
def pages(node: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system of the node."""
    if node.state is None:
        pytest.skip("the nodes of this cluster cannot mount this machine's folders")
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0777", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    node: Cluster, kube: Kube, pages: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("sglang")
    hicache.install()
    load_image(node, folder)
    requests = {pool: folder / pool for pool in QUESTIONS}
    for path in (*requests.values(), folder / "halting"):
        path.mkdir()
    halting.install(folder / "halting")
    kube.apply(
        sglang_router.router(tiny_model(), pages, folder / "halting", hicache.hash_function(), requests)
    )
    kube.until(ROUTER, LOAD_SECONDS, Ready="True", PrefixCacheShared="BothWays")
    with ExitStack() as stack:
        gateway = stack.enter_context(node.reach(kube, f"{ROUTER}-gateway", 8000))
        engines = {pool: stack.enter_context(node.reach(kube, f"{ROUTER}-{pool}", PORT)) for pool in requests}
        unmoved = sessions("unmoved")
        await play(unmoved, engines["greedy"], {"": engines["greedy"]})
        yield Fleet(node, kube, gateway, engines, pages, requests, unmoved)
    kube.kubectl("delete", "dpsrouter", ROUTER)


async def test_turns_are_routed_to_engines_started_by_the_operator(fleet: Fleet) -> None:
    session = await asyncio.to_thread(list, turns(fleet.gateway, SERVED_NAME, alternating(6)))
    lengths = [turn.prompt_tokens for turn in session]

    assert [(turn.number, turn.pool) for turn in session] == [
        (number, "speculative" if number % 2 == 0 else "greedy") for number in range(1, 7)
    ]
    assert [turn.engine_prompt_tokens for turn in session] == lengths
    assert [turn.delta_tokens for turn in session] == [
        lengths[0],
        *(after - before for before, after in pairwise(lengths)),
    ]


async def test_pools_share_pages(fleet: Fleet) -> None:
    await fleet.recover("none", await fleet.play(sessions("undisturbed")))


@pytest_asyncio.fixture(loop_scope="module")
async def other_geometry(fleet: Fleet) -> AsyncIterator[str]:
    """The URL of an engine of another geometry, which was started by hand and uses the same directory."""
    kube, name = fleet.kube, "by-hand"
    kube.apply(sglang_router.by_hand(name, kube.get("deployment", f"{ROUTER}-greedy")))
    kube.kubectl("expose", "pod", name, "--port", str(PORT))
    with fleet.node.reach(kube, name, PORT) as url:

        async def serves() -> None:
            assert await status_of(f"{url}/health") == 200

        await eventually_async(serves, LOAD_SECONDS)
        yield url
    kube.kubectl("delete", "pod", name, "--grace-period=1")


async def test_an_engine_of_another_geometry_reads_and_damages_no_page(
    fleet: Fleet, other_geometry: str
) -> None:
    """It has the same weights and pages of the same size, and is asked for the same prompts with the same salts."""
    ours = fewer_sessions("ours first")
    await play(ours, fleet.gateway, fleet.engines)
    check_answers(ours, fleet.unmoved)
    stored = fleet.stored()

    theirs, same = fewer_sessions("theirs first"), fewer_sessions("ours first")
    for played in (theirs, same):
        await play(played, other_geometry, {"": other_geometry})
    assert answers(same) == answers(theirs)
    assert [answer for answer in answers(same) if answer in answers(ours)] == []
    assert cached_at_first(same) == 0
    assert stored.items() <= fleet.stored().items()
    assert len({page.parent.name for page in fleet.stored()}) == 2

    ours, others = fewer_sessions("theirs first"), fewer_sessions("at the same time")
    await asyncio.gather(fleet.play(ours), play(others, other_geometry, {}))
    assert cached_at_first(ours) == 0
    assert answers(others) == answers(theirs)
    await fleet.recover("an engine of another geometry", ours)


@pytest.mark.parametrize("pool", QUESTIONS)
async def test_a_killed_engine_causes_no_wrong_answer(fleet: Fleet, pool: str) -> None:
    """It is killed in the middle of a write and of a fetch, while it sends a stream."""
    pod, requests = fleet.engine_pod(pool), fleet.requests[pool]
    killed = asyncio.Event()
    stream = LongStream(f"stream of the {pool} engine", LONG if pool == "greedy" else SHORT)

    async def halted() -> bool:
        return all((requests / f"{moment}{halting.HALTED}").exists() for moment in halting.MOMENTS)

    async with asyncio.TaskGroup() as group:
        group.create_task(stream.interrupted(fleet.gateway))
        await asyncio.wait_for(stream.begun.wait(), PATIENCE_SECONDS)
        assert stream.pool == pool
        for moment in halting.MOMENTS:
            (requests / moment).touch()
        playing = group.create_task(fleet.play_until(killed, f"{pool} killed"))
        await wait_until(halted, f"the {pool} engine has halted during a write and a fetch")
        assert list(fleet.pages.glob("*/*/*.tmp"))
        await asyncio.to_thread(kill, fleet.node, pod)
        killed.set()
    for moment in halting.MOMENTS:
        (requests / f"{moment}{halting.HALTED}").unlink()

    await asyncio.to_thread(fleet.restarted, pod, pool)
    played = playing.result()
    error_events = 1 + sum(len(session.interrupted) for session in played)
    await fleet.recover(f"{pool} engine killed during a write and a fetch", played, error_events)
    await stream.check(fleet.engines["greedy"])


STORAGE: Mapping[str, Callable[[Path], AbstractContextManager[None]]] = {
    "pages truncated": partial(storage_faults.repeatedly, storage_faults.truncate),
    "pages corrupted": partial(storage_faults.repeatedly, storage_faults.corrupt),
    "directory deleted": partial(storage_faults.repeatedly, storage_faults.delete),
    "disk full": storage_faults.full,
}


@pytest.mark.parametrize("fault", STORAGE)
async def test_faults_of_the_storage_cause_no_wrong_answer(fleet: Fleet, fault: str) -> None:
    with STORAGE[fault](fleet.pages):
        played = await fleet.play(fewer_sessions(fault))

    await fleet.recover(fault, played)
