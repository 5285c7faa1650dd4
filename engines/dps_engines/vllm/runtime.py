"""vLLM as an engine runtime: images, versions, ports, probes, command line."""

from collections.abc import Mapping, Sequence

from dps_engines.flags import arguments as rendered
from dps_engines.launch import Algorithm, EngineError, Launch, Speculation, Unshareable
from dps_engines.model_fit import fit_warning
from dps_engines.pools import PoolName
from dps_engines.versions import Released
from dps_engines.vllm import flags

DEFAULT_VERSION = "0.32.0"
REPOSITORY = "vllm/vllm-openai"
OLDEST_SUPPORTED = (0, 32, 0)
"""The oldest supported version. The tests compare the flags with its parser."""
MEMORY_FLAGS = (
    "--quantization",
    "--dtype",
    "--kv-cache-dtype",
    "--load-format",
    "--hf-overrides",
    "--cpu-offload-gb",
)
"""Flags that change the sizes of weights and KV caches on a GPU."""
SHORT = {"-q": "--quantization"}


class VLLM(Released):
    """Implements dps_engines.runtime.EngineRuntime."""

    title = "vLLM"
    repository = REPOSITORY
    default_version = DEFAULT_VERSION
    oldest_supported = OLDEST_SUPPORTED
    port = 8000
    module = "vllm.entrypoints.openai.api_server"
    health_path = "/health"
    load_seconds = 1800
    algorithms: Sequence[Algorithm] = tuple(flags.METHODS)
    environment: Mapping[str, str] = {
        # By default vLLM reports its hardware, model architecture and settings to a server of its authors.
        "VLLM_NO_USAGE_STATS": "1",
    }
    api_key_variable = "VLLM_API_KEY"

    cache_variables: Mapping[str, str] = {
        "VLLM_CACHE_ROOT": "vllm",
        "DG_JIT_CACHE_DIR": "deep_gemm",
        "TRITON_CACHE_DIR": "triton",
        # FlashInfer appends .cache/flashinfer.
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "CUDA_CACHE_PATH": "cuda",
    }

    def check_launch(
        self, launch: Launch, image: str | None, version: str | None, arguments: Sequence[str] = ()
    ) -> None:
        """See EngineRuntime."""
        speculation = launch.speculation
        if launch.shares_gpu_with is not None:
            raise EngineError(
                "spec.placement: SharedGPU divides the memory of a GPU only between SGLang engines; set it to "
                "SeparateGPUs, or use SGLang in both pools"
            )
        if speculation is None:
            return
        field = "spec.pools.speculative.speculation"
        if (speculation.top_k or 1) > 1:
            raise EngineError(f"{field}.topK: vLLM drafts no trees; remove topK and draftTokens")
        if speculation.algorithm == "Suffix" and image is None:
            raise EngineError(
                f"{field}.algorithm: Suffix needs the Python package arctic-inference, which is not in "
                f"{self.image(None, version)}; set the image to one that contains it"
            )

    def check_arguments(
        self, arguments: Sequence[str], speculation: Speculation | None, *, prefix_cache: bool = False
    ) -> None:
        """See EngineRuntime."""
        for argument in arguments:
            name = argument.split("=", 1)[0]
            if reason := flags.matching(argument, flags.UNSUPPORTED):
                raise EngineError(f"{name} is not supported: {reason}; remove it")
            if source := flags.matching(argument, flags.MANAGED):
                raise EngineError(f"{name} is set by {source}; remove it")

    def unshareable(
        self, version: str, speculation: Speculation, arguments: Mapping[PoolName, Sequence[str]]
    ) -> Unshareable | None:
        """See EngineRuntime."""
        return Unshareable(
            "RuntimeNotSupported",
            "only SGLang engines share pages; use SGLang in both pools, or set spec.prefixCache.mode to Separate",
        )

    def loads_plugin(self, version: str) -> bool:
        """See EngineRuntime."""
        return False

    def memory_arguments(self, launch: Launch, arguments: Sequence[str]) -> list[str]:
        """See EngineRuntime. vLLM itself measures the memory that is left for the KV caches of both models."""
        return []

    def memory_warning(self, launch: Launch, arguments: Sequence[str]) -> str:
        """See EngineRuntime."""
        names = {SHORT.get(name, name) for name in map(flags.flag_name, arguments)}
        return fit_warning(launch) if names.isdisjoint(MEMORY_FLAGS) else ""

    def host_cache_bytes(self, launch: Launch, line: Sequence[str]) -> int:
        """See EngineRuntime."""
        return 0

    def arguments(self, launch: Launch) -> list[str]:
        """See EngineRuntime."""
        # Users may pass --enable-lora as well, to load adapters while the engine runs.
        return [*rendered(launch, flags.FLAGS), *(["--enable-lora"] if launch.adapters else [])]
