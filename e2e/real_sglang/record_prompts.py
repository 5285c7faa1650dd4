"""record_prompts.py URL: record the length of each named prompt from a real server.

A rejected request is recorded with its status and without a length, because a router relays the rejection.
"""

import asyncio
import sys
from typing import Any

import aiohttp

from e2e.real_sglang.prompts import PromptCase, prompt_cases, reported_prompt_tokens, write


async def measure(session: aiohttp.ClientSession, case: PromptCase) -> dict[str, Any]:
    """The case with the server's `status` and `prompt_tokens` (null if the request was rejected)."""
    async with session.post(case.path, json=case.body) as answer:
        body = await answer.read()
    length = reported_prompt_tokens(case, body) if answer.status == 200 else None
    if length is None:
        print(f"{answer.status} {case.name}: {body[:300].decode()}", file=sys.stderr)
    return {
        "name": case.name,
        "path": case.path,
        "status": answer.status,
        "prompt_tokens": length,
        "body": case.body,
    }


async def main(url: str) -> None:
    """Measure every named prompt on the server at `url`, in order."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        write("prompt_tokens", [await measure(session, case) for case in prompt_cases()])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
