"""Engines whose passes take as long as was measured on running engines, instead of the roofline."""

from dataclasses import dataclass, field

from dps_lab.simulate.roofline import EngineTiming
from dps_local.emulated_sglang.scheduler import Step, StepKind


@dataclass(frozen=True)
class PassTimes:
    """Durations of an engine's passes in seconds.

    A prefill takes a fixed time and a time per uncached token; a decode step, which with speculation consists of the
    drafts and the verification, takes a fixed time and a time per running request.
    """

    prefill_base_seconds: float
    prefill_seconds_per_token: float
    decode_base_seconds: float
    decode_seconds_per_request: float


@dataclass(frozen=True)
class MeasuredTiming(EngineTiming):
    """Measured durations of an engine's passes. The hardware determines only the size of the KV cache."""

    passes: PassTimes = field(kw_only=True)

    def step_seconds(self, step: Step, refilled_tokens: int = 0) -> float:
        if step.kind is StepKind.PREFILL:
            # A prefill of the draft model alone was not measured. Its time per token is assumed to be proportional to
            # its share of the parameters.
            target, draft = self.hardware.target.active_parameters, self.hardware.draft.active_parameters
            tokens = step.uncached_tokens + refilled_tokens * draft / (target + draft)
            return self.passes.prefill_base_seconds + tokens * self.passes.prefill_seconds_per_token
        return self.passes.decode_base_seconds + len(step.sequences) * self.passes.decode_seconds_per_request
