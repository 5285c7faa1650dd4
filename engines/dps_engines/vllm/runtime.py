"""vLLM as an engine runtime: images, versions, ports, probes, command line."""

from collections.abc import Mapping, Sequence

from dps_engines.flags import arguments as rendered
from dps_engines.launch import Algorithm, EngineError, Launch, Speculation, Unshareable
from dps_engines.model_fit import check_split, check_weights
from dps_engines.pools import PoolName
from dps_engines.versions import Released, numbers
from dps_engines.vllm import flags

DEFAULT_VERSION = "0.32.0"
REPOSITORY = "vllm/vllm-openai"
OLDEST_SUPPORTED = (0, 12, 0)
"""The oldest supported version. The tests compare the flags with its parser and with newer ones."""
DRAFT_MODELS = (0, 15, 0)
"""The oldest version with draft models. Older ones raise NotImplementedError for the method draft_model."""
WEIGHT_FLAGS = (
    "--quantization",
    "--dtype",
    "--load-format",
    "--hf-overrides",
    "--cpu-offload-gb",
)
"""Flags that change the size of the weights on a GPU."""
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
        check_split(launch)
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
        in_use = self.version(image, version)
        if speculation.algorithm == "Standalone" and numbers(in_use) < DRAFT_MODELS:
            oldest = ".".join(map(str, DRAFT_MODELS))
            raise EngineError(
                f"{field}.algorithm: vLLM {in_use} supports no draft models; use {oldest} or newer, or choose "
                "another algorithm"
            )
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

    def memory_arguments(self, launch: Launch, version: str, arguments: Sequence[str]) -> list[str]:
        """See EngineRuntime. vLLM itself measures the memory that is left for the KV caches of both models."""
        names = {SHORT.get(name, name) for name in map(flags.flag_name, arguments)}
        if launch.gpu_bytes is not None and names.isdisjoint(WEIGHT_FLAGS):
            check_weights(launch, launch.gpu_bytes, "set --quantization in args")
        return []

    def host_cache_bytes(self, launch: Launch, line: Sequence[str]) -> int:
        """See EngineRuntime."""
        return 0

    def arguments(self, launch: Launch) -> list[str]:
        """See EngineRuntime."""
        # Users may pass --enable-lora as well, to load adapters while the engine runs.
        return [*rendered(launch, flags.FLAGS), *(["--enable-lora"] if launch.adapters else [])]
