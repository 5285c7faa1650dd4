"""Replaying the decisions in memory under another policy, with `dps simulate` in a child process."""

import asyncio
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from tempfile import NamedTemporaryFile
from typing import Any, Final

import orjson

from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.recent import Record

MAX_SECONDS: Final = 120.0
"""Maximum duration of one simulation."""

_FIELDS: Final = ("time", "session", "turn", "prompt_tokens", "output_tokens", "total_seconds")
"""The fields of records that a simulation reads."""

_one_at_a_time = asyncio.Lock()


class WhatIfError(Exception):
    """The simulation is not possible. The message states why."""


async def simulate(runtime: Runtime, options: Any) -> dict[str, Any]:
    """The reports of `dps simulate` for the configuration in force (`now`), and for `options` (`then`).

    options: `policy`, `threshold` (a number of tokens or `none`) and `fleet`, as options of the command.
    Raises WhatIfError.
    """
    if find_spec("dps_lab") is None:
        raise WhatIfError(
            "the lab is not installed beside this gateway; save the decision log, and run 'dps simulate --workload "
            "FILE' where 'dps-router[lab]' is installed"
        )
    keys = ("policy", "threshold", "fleet")
    if not isinstance(options, dict) or not all(isinstance(options.get(key), str) for key in keys):
        raise WhatIfError(f"the request must be an object with the texts {', '.join(keys)}")
    # There may be thousands of them, and other requests are served meanwhile.
    turns = await asyncio.to_thread(_replayable, runtime.recent.after(0, runtime.recent.added))
    if not turns:
        raise WhatIfError("this gateway has no complete turns in memory")
    routing = runtime.config.routing
    in_force = {
        "policy": routing.policy,
        "threshold": "none" if routing.threshold_tokens is None else str(routing.threshold_tokens),
        "fleet": ",".join(f"{name}={max(1, len(pool.replicas))}" for name, pool in runtime.pools.items()),
    }
    cache = "common" if routing.common_prefix_cache else "separate"
    with NamedTemporaryFile() as file:
        file.writelines(turns)
        file.flush()
        fixed = {"workload": file.name, "cache": cache}
        async with _one_at_a_time:
            return {
                "turns": len(turns),
                "now": await _report({**in_force, **fixed}),
                "then": await _report({**{key: options[key] for key in keys}, **fixed}),
            }


def _replayable(records: Sequence[Record]) -> list[bytes]:
    """A line of JSON for each record that has everything that a simulation needs."""
    documents = [record.document() for record in records]
    return [
        orjson.dumps({key: document[key] for key in _FIELDS}) + b"\n"
        for document in documents
        if document["outcome"] == "complete" and None not in (document["turn"], document["output_tokens"])
    ]


async def _report(options: dict[str, str]) -> dict[str, Any]:
    """Raises WhatIfError with the command's own message."""
    command = ["nice", "-n", "19", sys.executable, "-P", "-m", "dps_cli", "simulate", "--json"]
    command += [f"--{name}={value}" for name, value in options.items()]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(MAX_SECONDS):
            output, errors = await child.communicate()
    except TimeoutError:
        raise WhatIfError(f"the simulation took longer than {MAX_SECONDS:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode != 0:
        raise WhatIfError(errors.decode(errors="replace").strip().rpartition("\n")[2])
    report: dict[str, Any] = orjson.loads(output)
    return report
