"""check_lengths.py GATEWAY_URL: compare the gateway's prompt lengths with the engine's.

    .venv/bin/python -m e2e.real_sglang.check_lengths http://127.0.0.1:8000

Sends every named prompt (prompts.py) and turns of BFCL sessions through a gateway to real SGLang servers. Compares
the header `x-dps-prompt-tokens` with the length in the engine's answer, prints a table, and exits with status 1 if
a length differs or the header is missing.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import aiohttp

from dps_lab.workload.assets import bfcl
from dps_lab.workload.bfcl import AnswerStyle, load_bfcl
from e2e.real_sglang.lengths import reported_prompt_tokens
from e2e.real_sglang.prompts import CHAT, MODEL, PromptCase, continuations, prompt_cases

HEADER = "x-dps-prompt-tokens"
CORRECT = {"equal", "rejected"}
"""The verdicts that are no errors."""
CONCURRENT_REQUESTS = 16
BFCL_SESSIONS = 12
"""Three to four turns each, about forty in total."""


@dataclass(frozen=True)
class Check:
    """The lengths of one prompt in tokens; None if the header is missing or the engine rejected the request."""

    name: str
    status: int
    gateway: int | None
    engine: int | None

    @property
    def verdict(self) -> str:
        """`equal`, `rejected` (by the engine, so that there is no length to compare), or the problem."""
        if self.engine is None:
            return "rejected" if self.status in (400, 500) else f"failed with {self.status}"
        if self.gateway is None:
            return "NO HEADER"
        return "equal" if self.gateway == self.engine else "DIFFERENT"


def bfcl_cases() -> Iterator[PromptCase]:
    """The turns of BFCL sessions in order, with tools in the prompt and recorded answers as history."""
    source = bfcl()
    if source.source != "registry":
        sys.exit(f"BFCL is required, but only {source.description} is available")
    styles: tuple[AnswerStyle, ...] = ("text", "tool_calls")
    for answers in styles:
        for session in islice(load_bfcl(source.path, answers), 0, None, 800 // (BFCL_SESSIONS // 2)):
            for number, messages in enumerate(session.prompts(), start=1):
                body = {"model": MODEL, "max_tokens": 1, "messages": messages, "tools": session.tools}
                yield PromptCase(f"bfcl ({answers}): {session.id} turn {number}", CHAT, body)


async def check(session: aiohttp.ClientSession, case: PromptCase, model: str | None = None) -> Check:
    """Send one request and read both lengths. `model` replaces the name of the model."""
    body = dict(case.body) if model is None else {**case.body, "model": model}
    async with session.post(case.path, json=body) as answer:
        content = await answer.read()
    header = answer.headers.get(HEADER)
    engine = reported_prompt_tokens(content, continuations(body)) if answer.status == 200 else None
    return Check(case.name, answer.status, None if header is None else int(header), engine)


async def check_all(url: str, cases: Iterable[PromptCase], model: str | None = None) -> list[Check]:
    """Send the requests to the gateway at `url`, several at the same time. `model` is described at `check`."""
    connector = aiohttp.TCPConnector(limit=CONCURRENT_REQUESTS)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*(check(session, case, model) for case in cases))


async def main(url: str) -> int:
    """Check every request against the gateway at `url`; returns the exit status."""
    checks = await check_all(url, (*prompt_cases(), *bfcl_cases()))
    for result in checks:
        print(
            f"{result.verdict:10} gateway {result.gateway or '-':>6} engine {result.engine or '-':>6}  {result.name}"
        )
    verdicts = Counter(result.verdict for result in checks)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    return 0 if verdicts.keys() <= CORRECT else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
