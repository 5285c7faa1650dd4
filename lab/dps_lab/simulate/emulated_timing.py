"""The cost model of the emulated engines (`dps engine`) in a simulation, instead of the roofline."""

from dataclasses import dataclass
from typing import Final

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_lab.simulate.roofline import EngineTiming
from dps_local.emulated_sglang.scheduler import Step, StepKind
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.emulated_sglang.time_model import TimeModel

CAPACITY_TOKENS: Final = EngineSettings.max_total_tokens
"""Size of an emulated engine's KV cache."""

SHARED_PAGE_TOKENS: Final = PAGE_TOKENS
"""Tokens per page of the emulated engines that share a cache."""


@dataclass(frozen=True)
class EmulatedTiming(EngineTiming):
    """Durations of an emulated engine's forward passes. The hardware determines only the bytes per token."""

    def step_seconds(self, step: Step, refilled_tokens: int = 0) -> float:
        model = TimeModel(speculation=self.speculation)
        if step.kind is StepKind.PREFILL:
            return model.prefill_seconds(step.uncached_tokens, refilled_tokens)
        return model.decode_seconds(len(step.sequences))
