"""Compares the simulation with real gateways and emulated engines in real time, for sessions that differ in acceptance.

python -m dps_tools.real_time [CONCURRENCY ...]

Both serve the sessions of `toolbench`, whose lengths the requests have in random tokens, with `Adaptive` on one
speculative and one greedy engine that have a common prefix cache. The simulated engines use the emulated engines' time
model here instead of the roofline. The real processes share the machine's cores, so nothing else must run.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any, Final
from unittest.mock import patch

import aiohttp
import orjson

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import policy_named
from dps_lab.simulate.engine import VirtualEngine
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.report import session_seconds
from dps_lab.simulate.run import Load, Scenario, simulate
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import Mixture, load_workload, mixed
from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.scheduler import Step, StepKind
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, TimeModel
from dps_local.stack import LocalStack, StackOptions

MIXTURE: Final[Mixture] = {(0.35,): 1.0, (0.85,): 1.0}
CONCURRENCY: Final = (8, 16, 32)
SPECULATION: Final = SPECULATION_DEFAULTS["STANDALONE"]

# Their texts are independent of their neighbours, and no tokenizer has fewer.
TOKENS: Final = range(300, 3000)


def emulated_seconds(engine: VirtualEngine, step: Step, refilled_tokens: int) -> float:
    """The duration of a step on an emulated engine. Replaces `VirtualEngine.step_seconds`."""
    model = TimeModel(speculation=engine.timing.speculation)
    if step.kind is StepKind.PREFILL:
        return model.prefill_seconds(step.uncached_tokens, refilled_tokens)
    return model.decode_seconds(len(step.sequences))


def simulated(sessions: Sequence[SessionTrace], concurrency: int) -> tuple[float, float]:
    """The batch time and the mean session latency of a simulation, in seconds."""
    fleet = FleetSpec(dict.fromkeys(Pool, 1), cache="common", speculation=SPECULATION)
    scenario = Scenario(fleet, policy_named("Adaptive", None), Load(concurrency=concurrency))
    with patch.object(VirtualEngine, "step_seconds", emulated_seconds):
        turns = simulate(sessions, scenario)
    return max(turn.finished for turn in turns), mean(session_seconds(turns))


async def _session(http: aiohttp.ClientSession, url: str, session: SessionTrace) -> float:
    """Send the turns of a session. Returns its latency in seconds."""
    began, rng, history = time.perf_counter(), random.Random(session.id), list[int]()
    for turn, base in zip(session.turns, session.base_tokens(), strict=True):
        prompt = history[: turn.prompt_tokens] if base else []
        prompt += rng.choices(TOKENS, k=turn.prompt_tokens - len(prompt))
        sampling = {"max_new_tokens": turn.output_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        acceptance = session.acceptance if turn.acceptance is None else turn.acceptance
        headers = {"x-session-id": session.id, "x-emulate-acceptance": str(acceptance)}
        async with http.post(
            f"{url}/generate", json=body, headers=headers, raise_for_status=True
        ) as response:
            *_, last, done = (await response.read()).strip().split(b"\n\n")
        if done != b"data: [DONE]":
            raise RuntimeError(f"session {session.id}: the answer is not complete")
        answer: dict[str, Any] = orjson.loads(last.removeprefix(b"data: "))
        history = prompt + answer["output_ids"]
    return time.perf_counter() - began


async def real(sessions: Sequence[SessionTrace], concurrency: int) -> tuple[float, float]:
    """The batch time and the mean session latency through a real gateway, in seconds."""
    options = StackOptions(tokenizer=bundled_tokenizer(), policy="Adaptive", prefix_cache="common")
    waiting, seconds = iter(sessions), list[float]()

    async def client(http: aiohttp.ClientSession, url: str, sessions: Iterator[SessionTrace]) -> None:
        for session in sessions:
            seconds.append(await _session(http, url, session))

    async with LocalStack(options) as stack, aiohttp.ClientSession(read_bufsize=2**20) as http:
        url = stack.urls[0].removesuffix("/v1")
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client(http, url, waiting))
        return time.perf_counter() - began, mean(seconds)


def main(levels: Sequence[int]) -> None:
    """Print the batch time and the mean session latency of both, and their ratios."""
    sessions = mixed(load_workload("toolbench"), MIXTURE, seed=0)
    for concurrency in levels:
        expected = simulated(sessions, concurrency)
        measured = asyncio.run(real(sessions, concurrency))
        pairs = zip(("batch", "session mean"), expected, measured, strict=True)
        texts = [
            f"{name} {now:.1f} s, simulated {before:.1f} s ({now / before - 1:+.1%})"
            for name, before, now in pairs
        ]
        print(f"c = {concurrency}: {'; '.join(texts)}", flush=True)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or CONCURRENCY)
