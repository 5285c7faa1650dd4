"""record_prompts.py URL OUT: record the length of each named prompt from a real server in OUT (JSON).

A rejected request is recorded with its status and without a length, because a router relays the rejection.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from e2e.real_sglang.lengths import reported_prompt_tokens
from e2e.real_sglang.prompts import PromptCase, continuations, prompt_cases


async def measure(session: aiohttp.ClientSession, case: PromptCase) -> dict[str, Any]:
    """The case with the server's `status` and `prompt_tokens` (null if the request was rejected)."""
    async with session.post(case.path, json=case.body) as answer:
        body = await answer.read()
    length = reported_prompt_tokens(body, continuations(case.body)) if answer.status == 200 else None
    if length is None:
        print(f"{answer.status} {case.name}: {body[:300].decode()}", file=sys.stderr)
    return {
        "name": case.name,
        "path": case.path,
        "status": answer.status,
        "prompt_tokens": length,
        "body": case.body,
    }


async def record(url: str) -> list[dict[str, Any]]:
    """Measure every named prompt on the server at `url`, in order."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        return [await measure(session, case) for case in prompt_cases()]


def main(url: str, out: Path) -> None:
    """Record from `url` into `out`, one case per line."""
    lines = [json.dumps(entry, ensure_ascii=True) for entry in asyncio.run(record(url))]
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
