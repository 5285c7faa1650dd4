"""record_prompts.py URL OUT: asks a real server how long each named prompt is, and writes that to OUT (JSON).

A request that the server refuses is written with its status and no length: a router relays the refusal.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from e2e.real_sglang.lengths import reported_prompt_tokens
from e2e.real_sglang.prompts import PromptCase, continuations, prompt_cases


async def ask(session: aiohttp.ClientSession, case: PromptCase) -> dict[str, Any]:
    """The case with the server's ``status`` and ``prompt_tokens`` (null unless it answered)."""
    async with session.post(case.path, json=case.body) as answer:
        body = await answer.read()
    told = reported_prompt_tokens(body, continuations(case.body)) if answer.status == 200 else None
    if told is None:
        print(f"{answer.status} {case.name}: {body[:300].decode()}", file=sys.stderr)
    return {
        "name": case.name,
        "path": case.path,
        "status": answer.status,
        "prompt_tokens": told,
        "body": case.body,
    }


async def record(url: str) -> list[dict[str, Any]]:
    """Every named prompt with what the server at ``url`` says of it, in order."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        return [await ask(session, case) for case in prompt_cases()]


def main(url: str, out: Path) -> None:
    """Record from ``url`` into ``out``, one case a line."""
    lines = [json.dumps(entry, ensure_ascii=True) for entry in asyncio.run(record(url))]
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
