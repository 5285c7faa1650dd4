"""The supported engines by the name that `spec.engine.runtime` selects."""

from collections.abc import Mapping

from dps_engines.runtime import EngineRuntime
from dps_engines.sglang.runtime import SGLang
from dps_engines.vllm.runtime import VLLM

RUNTIMES: Mapping[str, EngineRuntime] = {"SGLang": SGLang(), "VLLM": VLLM()}
