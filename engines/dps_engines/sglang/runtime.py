"""SGLang as an engine runtime: images, versions, ports, probes, command line."""

from collections.abc import Mapping, Sequence

from dps_engines.flags import arguments as rendered
from dps_engines.launch import Algorithm, EngineError, Launch, Speculation, Unshareable
from dps_engines.model_fit import fit_warning
from dps_engines.pools import PoolName
from dps_engines.sglang import flags, host_memory
from dps_engines.sglang import prefix_cache as cache_flags
from dps_engines.sglang.memory import limits_memory
from dps_engines.sglang.shared_gpu import shared_arguments
from dps_engines.versions import Released
from dps_sglang.compatibility import VERSIONS

DEFAULT_VERSION = "0.5.23"
"""The newest version with which the tests are run. It leaves room for draft models."""
REPOSITORY = "lmsysorg/sglang"
OLDEST_SUPPORTED = (0, 5, 23)
"""The oldest supported version. The tests compare the flags with its parser."""


class SGLang(Released):
    """Implements dps_engines.runtime.EngineRuntime."""

    title = "SGLang"
    repository = REPOSITORY
    default_version = DEFAULT_VERSION
    oldest_supported = OLDEST_SUPPORTED
    port = 30000
    module = "sglang.launch_server"
    health_path = "/health"
    load_seconds = 1800
    algorithms: Sequence[Algorithm] = ("Standalone", "Eagle", "Eagle3", "Ngram")
    environment: Mapping[str, str] = {
        # By default /health generates a token, which a busy engine delays. A scheduler that hangs is ended by
        # SGLang's own watchdog.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    api_key_variable: str | None = None

    cache_variables: Mapping[str, str] = {
        "SGLANG_CACHE_DIR": "sglang",
        "SGLANG_DG_CACHE_DIR": "deep_gemm",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        # FlashInfer appends .cache/flashinfer.
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "TILELANG_CACHE_DIR": "tilelang",
        "CUDA_CACHE_PATH": "cuda",
    }

    def check_launch(
        self, launch: Launch, image: str | None, version: str | None, arguments: Sequence[str] = ()
    ) -> None:
        """See EngineRuntime."""
        if flags.DP_ATTENTION not in arguments:
            _check_data_parallelism(arguments)
        if launch.speculation is None:
            return
        field, algorithm = "spec.pools.speculative.speculation.algorithm", launch.speculation.algorithm
        if algorithm not in self.algorithms:
            raise EngineError(
                f"{field}: SGLang has no suffix decoding; choose Ngram, or set spec.pools.speculative.runtime to VLLM"
            )
        cause = "spec.model.adapters" if launch.adapters else flags.ENABLE_LORA
        supported = flags.ALGORITHMS_WITH_ADAPTERS
        if algorithm not in supported and (launch.adapters or cause in arguments):
            raise EngineError(
                f"{field}: SGLang supports no LoRA adapters with {algorithm}; choose "
                f"{' or '.join(supported)}, or remove {cause}"
            )

    def check_arguments(
        self, arguments: Sequence[str], speculation: Speculation | None, *, prefix_cache: bool = False
    ) -> None:
        """See EngineRuntime."""
        managed = flags.MANAGED | (cache_flags.MANAGED if prefix_cache else {})
        for argument in arguments:
            name = argument.split("=", 1)[0]
            if reason := flags.unsupported(argument):
                raise EngineError(f"{name} is not supported: {reason}; remove it")
            if speculation is None and name.startswith("--spec"):
                source: str | None = "spec.pools.speculative.speculation, and only for the speculative pool"
            else:
                source = flags.managed_by(argument, managed)
            if source:
                raise EngineError(f"{name} is set by {source}; remove it")

    def memory_arguments(self, launch: Launch, arguments: Sequence[str]) -> list[str]:
        """See EngineRuntime. An engine that has its GPUs for itself divides the memory itself."""
        other = launch.shares_gpu_with
        return [] if other is None else shared_arguments(launch, other, arguments)

    def memory_warning(self, launch: Launch, arguments: Sequence[str]) -> str:
        """See EngineRuntime."""
        return "" if limits_memory(arguments) else fit_warning(launch)

    def host_cache_bytes(self, launch: Launch, line: Sequence[str]) -> int:
        """See EngineRuntime."""
        return host_memory.host_cache_bytes(launch, line)

    def arguments(self, launch: Launch) -> list[str]:
        """See EngineRuntime."""
        cache = cache_flags.FLAGS if launch.prefix_cache is not None else ()
        return rendered(launch, (*flags.FLAGS, *cache))

    def unshareable(
        self, version: str, speculation: Speculation, arguments: Mapping[PoolName, Sequence[str]]
    ) -> Unshareable | None:
        """See EngineRuntime."""
        return cache_flags.unshareable(version, speculation, arguments)

    def loads_plugin(self, version: str) -> bool:
        """See EngineRuntime."""
        return version in VERSIONS


def _check_data_parallelism(arguments: Sequence[str]) -> None:
    """Raises EngineError if the arguments multiply the GPUs. They do not contain --enable-dp-attention."""
    for argument in arguments:
        if reason := flags.unsupported(argument, flags.UNSUPPORTED_WITHOUT_DP_ATTENTION):
            name = argument.split("=", 1)[0]
            raise EngineError(f"{name} is not supported without {flags.DP_ATTENTION}: {reason}; remove it")
