"""The `dps engine` command."""

import asyncio
import sys

from dps_local.emulated_sglang import flags, server


def main(argv: list[str]) -> int:
    """Run an emulated SGLang server until SIGINT or SIGTERM. Returns 0, or 1 if it cannot start."""
    settings = flags.parse(argv)
    try:
        asyncio.run(server.serve(settings))
    except (OSError, ValueError) as error:
        print(f"dps engine: {error}", file=sys.stderr)
        return 1
    return 0
