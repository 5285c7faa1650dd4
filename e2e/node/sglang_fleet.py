"""A DPSRouter with real SGLang in pods whose pools share a prefix cache, and sessions that are played on it."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_local.stack import MODEL as SERVED_NAME
from dps_sglang.metrics import PAGES
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.http import metric, status_of
from dps_testkit.waiting import eventually
from e2e.node import halting, sglang_router
from e2e.node.containers import until_restarted
from e2e.node.mounts import LOAD_SECONDS, copy_libraries, load_image
from e2e.node.sessions import alternating, turns
from e2e.node.sglang_router import PORT, ROUTER, Pair
from e2e.prefix_cache import hicache, mooncake
from e2e.prefix_cache.alternation import cached_share, check, check_answers, fewer_sessions, lacking, sessions
from e2e.prefix_cache.sessions import Session, play
from e2e.prefix_cache.shared_servers import FETCH_THRESHOLD
from e2e.real_sglang.local_sglang import tiny_model

DISK = 256 * 2**20
"""The size of the volume, twice the size limit of all pages."""
ATTEMPTS = 6
"""Rounds of sessions after a fault, in one of which the pools must share pages. A busy machine may exceed SGLang's time
limit for fetches, so the first one may fail."""
QUESTIONS = dict(zip(("greedy", "speculative"), alternating(2), strict=True))
"""For each pool, a first question that is routed to it."""
OUTCOMES = ("rejected", "evicted")
PODS = f"dpsrouter.io/router={ROUTER}"


@dataclass(frozen=True)
class Fleet:
    """A DPSRouter that is ready, and the URLs of its gateway and of the engine of each pool.

    pages: the directory of the prefix cache. requests: for each pool, the folder with requests to halt. unmoved:
    sessions that were played on the greedy engine alone.
    """

    pair: Pair
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

    async def store(self, pool: str, played: Sequence[Session]) -> None:
        """Play sessions on a pool's engine alone, until it has stored their pages."""
        url = self.engines[pool]
        await play(played, url, {"": url}, self.pair.page_tokens)

    async def play_until(self, ended: asyncio.Event, salt: str) -> Sequence[Session]:
        """Play sessions of all kinds again and again until the event is set."""
        played: list[Session] = []
        while not ended.is_set():
            played += await self.play(sessions(f"{salt} {len(played)}"))
        return played

    async def recover(
        self,
        fault: str,
        played: Sequence[Session],
        kinds: Callable[[str], Sequence[Session]] = fewer_sessions,
    ) -> None:
        """Play sessions of these kinds until the pools share pages, and print a row of the table in docs/faults.md.

        played: the sessions during the fault. Fails if a request fails, a stream ends with an error event, or an answer
        is wrong in any round.
        """
        for attempt in range(ATTEMPTS):
            after = kinds(f"after {fault} {attempt}")
            await play(after, self.gateway, self.engines)
            check_answers(after, self.unmoved)
            if lacking(after, self.unmoved) <= PAGE_TOKENS + FETCH_THRESHOLD:
                break
        check(after, self.unmoved)
        during, afterwards = (f"{cached_share(each, self.unmoved):.0%}" for each in (played, after))
        number = sum(len(session.turns) for session in (*played, *after))
        row = (self.pair.algorithm, fault, number, 0, 0, 0, during, afterwards, attempt + 1)
        print(f"| {' | '.join(map(str, row))} |")

    async def pages_by_outcome(self) -> Counter[str]:
        """The plugin's metric of the pages that the engines read and wrote."""
        found: Counter[str] = Counter()
        for url in self.engines.values():
            for outcome in OUTCOMES:
                found[outcome] += int(await metric(url, f"{PAGES}_total", outcome=outcome))
        return found

    def stored(self) -> Mapping[Path, bytes]:
        """The digest of each stored page."""
        return {page: sha256(page.read_bytes()).digest() for page in self.pages.glob("*/*/*.page")}

    def engine_pod(self, pool: str) -> Manifest:
        """The pod of a pool's only engine."""
        (pod,) = self.kube.list("pod", f"{PODS},dpsrouter.io/component={pool}")
        return pod

    def restarted(self, pod: Manifest, pool: str) -> None:
        """Wait until a killed engine serves again, through its Service too, and the gateway sends it requests."""
        until_restarted(self.kube, pod, LOAD_SECONDS)
        attempts = count(1)

        def routed() -> None:
            # Each attempt is a new session. A repeated prompt would have ΔL = 0, which would determine its pool.
            system = f"You are brief. This is attempt {next(attempts)}."
            (first,) = turns(self.gateway, SERVED_NAME, [QUESTIONS[pool]], system=system)
            assert first.pool == pool
            assert asyncio.run(status_of(f"{self.engines[pool]}/health")) == 200

        eventually(routed)


@asynccontextmanager
async def running(node: Cluster, kube: Kube, folder: Path, pair: Pair) -> AsyncIterator[Fleet]:
    """Create the DPSRouter with an empty directory for pages, and delete it on exit.

    folder: an empty one. Skips the test if the node cannot mount this machine's folders.
    """
    if node.state is None:
        pytest.skip("the nodes of this cluster cannot mount this machine's folders")
    hicache.install()
    load_image(node, folder)
    folders = sglang_router.Folders(
        model=tiny_model(),
        modules=hicache.compiled_modules(),
        libraries=folder / "libraries",
        pages=folder / "pages",
        halting=folder / "halting",
        requests={pool: folder / pool for pool in QUESTIONS},
    )
    for path in (folders.libraries, folders.pages, folders.halting, *folders.requests.values()):
        path.mkdir()
    halting.install(folders.halting)
    if pair.backend == "Mooncake":
        mooncake.install()
        copy_libraries(mooncake.BINARIES, folders.libraries)
    with ExitStack() as stack:
        stack.enter_context(_small_disk(folders.pages))
        kube.apply(sglang_router.router(folders, pair))
        stack.callback(_delete, kube)
        kube.until(ROUTER, LOAD_SECONDS, Ready="True", PrefixCacheShared="BothWays")
        gateway = stack.enter_context(node.reach(kube, f"{ROUTER}-gateway", 8000))
        engines = {
            pool: stack.enter_context(node.reach(kube, f"{ROUTER}-{pool}", PORT)) for pool in QUESTIONS
        }
        unmoved = sessions("unmoved")
        await play(unmoved, engines["greedy"], {"": engines["greedy"]}, pair.page_tokens)
        yield Fleet(pair, node, kube, gateway, engines, folders.pages, folders.requests, unmoved)


def _delete(kube: Kube) -> None:
    """Delete the DPSRouter, and wait until the memory of its pods is free. No request is left that they could drain."""
    kube.kubectl("delete", "dpsrouter", ROUTER)
    kube.kubectl(
        "delete", "pod", "--selector", PODS, "--grace-period=1", "--ignore-not-found", "--wait=false"
    )
    kube.kubectl("wait", "--for=delete", "pod", "--selector", PODS, "--timeout=100s")


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system at a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0777", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
