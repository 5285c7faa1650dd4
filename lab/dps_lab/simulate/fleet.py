"""A simulated fleet: which engines there are, which GPUs they run on, and which caches they share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from dps_engines.sglang.prefix_cache import GREEDY, SHARED
from dps_gateway.pool import Pool
from dps_lab.simulate.adaptive_drafts import SGLANG_STEPS, AdaptiveEngine, StepsByBatch
from dps_lab.simulate.engine import CacheLink, VirtualEngine
from dps_lab.simulate.hardware import HARDWARE, Hardware
from dps_lab.simulate.roofline import EngineTiming, kv_capacity, speculation
from dps_local.emulated_sglang.settings import MAX_RUNNING_SPECULATIVE, EngineSettings
from dps_local.emulated_sglang.time_model import Speculation


class FleetError(ValueError):
    """The fleet is invalid. The message states what to change."""


@dataclass(frozen=True)
class Budget:
    """Replicas move between the pools by their demand, as with the operator's `spec.gpuBudget`. Times are in seconds.

    start_seconds: from the end of the last request of the engine that stops until the new one serves. load_ratio: see
    `dps_engines.gpu_budget.pool_to_grow`.
    """

    cooldown_seconds: float = 600.0
    start_seconds: float = 120.0
    load_ratio: float = 1.0


@dataclass(frozen=True)
class FleetSpec:
    """A fleet, described by the number of engines of each pool. Rates are in bytes per second.

    budget: how replicas move between the pools; None if they do not.
    adaptive: how many of the speculative engines adapt their draft length to the batch, among `steps_by_batch`.
    """

    engines: dict[Pool, int]
    one_gpu: bool = False
    cache: Literal["separate", "common"] = "separate"
    serialized: bool = False
    hardware: Hardware = field(default_factory=lambda: HARDWARE["a100-7b"])
    speculation: Speculation = field(default_factory=lambda: speculation("STANDALONE"))
    transfer_bytes_per_second: float = 20e9
    adaptive: int = 0
    steps_by_batch: StepsByBatch = field(default_factory=lambda: SGLANG_STEPS)
    budget: Budget | None = None

    @property
    def gpus(self) -> int:
        """GPUs that the fleet occupies."""
        count = 1 if self.one_gpu else sum(self.engines.values())
        return count * self.hardware.tensor_parallel


ADAPTIVE: Final = "adaptive"
"""The kind of the engines that adapt their draft length to the batch."""

KINDS: Final = "speculative=N,greedy=M,adaptive=K"

MAX_ENGINES: Final = 1000
"""More would take minutes to create, and are most likely a mistake."""


def parse_fleet(text: str) -> tuple[dict[Pool, int], int]:
    """The number of engines of each pool, and how many of the speculative ones adapt. Raises FleetError.

    The text has numbers by kind, such as `speculative=1,greedy=1`. The kind `adaptive` adds to the speculative pool.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = (piece.strip() for piece in part.partition("="))
        if name not in (*Pool, ADAPTIVE):
            raise FleetError(f"'{name}' is not a kind of engine; write {KINDS}")
        if name in counts:
            raise FleetError(f"{name} occurs twice; write {KINDS}")
        if re.fullmatch("[0-9]{1,4}", count) is None:
            raise FleetError(
                f"{name}={count[:9]}: the number of engines must be a whole number from 0 to {MAX_ENGINES}"
            )
        counts[name] = int(count)
    if sum(counts.values()) > MAX_ENGINES:
        raise FleetError(f"a fleet may have at most {MAX_ENGINES} engines")
    if not any(counts.values()):
        raise FleetError(f"the fleet has no engine; write {KINDS} with N + M + K above 0")
    adaptive = counts.get(ADAPTIVE, 0)
    engines = {pool: counts.get(pool, 0) for pool in Pool}
    engines[Pool.SPECULATIVE] += adaptive
    return engines, adaptive


def build_engines(spec: FleetSpec) -> list[list[VirtualEngine]]:
    """The engines, grouped by the GPUs that they share. Raises ValueError if the weights do not fit."""
    pools = [pool for pool, count in spec.engines.items() for _ in range(count)]
    groups = [pools] if spec.one_gpu else [[pool] for pool in pools]
    names = {pool: iter(range(count)) for pool, count in spec.engines.items()}
    engines: list[list[VirtualEngine]] = []
    for group in groups:
        timings = [
            EngineTiming(spec.hardware, spec.speculation if pool is Pool.SPECULATIVE else None)
            for pool in group
        ]
        capacities = kv_capacity(timings)
        engines.append(
            [
                _engine(spec, pool, next(names[pool]), timing, capacity)
                for pool, timing, capacity in zip(group, timings, capacities, strict=True)
            ]
        )
    if spec.cache == "common":
        share(spec, [engine for group in engines for engine in group])
    return engines


def additional_engine(spec: FleetSpec, pool: Pool, number: int) -> VirtualEngine:
    """One more engine of a pool, on GPUs of its own. number: differs from those of the pool's other engines."""
    one = replace(spec, engines={pool: 1, pool.other: 0}, one_gpu=False, cache="separate", adaptive=0)
    ((engine,),) = build_engines(one)
    engine.url = f"{pool}-{number}"
    return engine


def _engine(spec: FleetSpec, pool: Pool, number: int, timing: EngineTiming, capacity: int) -> VirtualEngine:
    speculative = pool is Pool.SPECULATIVE
    kind = AdaptiveEngine if speculative and number < spec.adaptive else VirtualEngine
    engine = kind(
        url=f"{pool}-{number}",
        pool=pool,
        timing=timing,
        capacity=capacity,
        max_running=MAX_RUNNING_SPECULATIVE if speculative else EngineSettings.max_running_requests,
        serialized=speculative and spec.serialized,
    )
    if isinstance(engine, AdaptiveEngine):
        engine.steps_by_batch = spec.steps_by_batch
    return engine


def share(spec: FleetSpec, engines: Sequence[VirtualEngine]) -> None:
    """Link each engine to the engines whose cached prefixes it can fetch according to SHARED."""
    seconds = spec.hardware.target.kv_bytes_per_token / spec.transfer_bytes_per_second
    for reader in engines:
        reader.links.clear()
        for writer in engines:
            if writer is not reader and (_algorithm(writer), _algorithm(reader)) in SHARED:
                refill = reader.timing.uses_draft_model and not writer.timing.uses_draft_model
                reader.links.append(CacheLink(writer, seconds, refill))


def _algorithm(engine: VirtualEngine) -> str:
    """The algorithm in SHARED. Suffix decoding shares like n-grams, since it does not affect the KV cache either."""
    chosen = engine.timing.speculation
    if chosen is None:
        return GREEDY
    return "NGRAM" if chosen.algorithm == "SUFFIX" else chosen.algorithm
