"""`spec.routing.calibration`: `dps calibrate`, run on the gateways' decision logs."""

from typing import Literal

from pydantic import Field

from dps_operator.api.types import APIObject

Objective = Literal["session", "session-p95", "batch", "ttft", "ttft-p95", "tpot"]

SimulatedHardware = Literal["a100-7b", "h100-7b", "h200-7b", "a100-70b", "h100-70b", "h200-70b"]


class Calibration(APIObject):
    """The schedule and the objective of calibrations. The gateways keep a decision log, which contains no prompts."""

    schedule: str = Field(
        default="0 3 * * *",
        min_length=1,
        max_length=100,
        description="When a calibration starts, as in a CronJob, in UTC.",
    )
    objective: Objective = Field(
        default="session",
        description="What to minimise: the median session latency (session), the time for all sessions (batch), the "
        "median time to first token (ttft), the median time per output token (tpot), or a 95th percentile.",
    )
    hardware: SimulatedHardware = Field(
        default="a100-7b",
        description="The GPU and the size of the model that the simulation assumes; choose the most similar one.",
    )
    apply: bool = Field(
        default=False,
        description="Whether the gateways use the recommended policy and threshold instead of those in spec.routing.",
    )
