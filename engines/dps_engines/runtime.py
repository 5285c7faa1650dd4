"""The interface of an inference engine."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dps_engines.launch import Algorithm, Launch, Speculation, Unshareable
from dps_engines.pools import PoolName


class EngineRuntime(Protocol):
    """One kind of inference engine. Stateless: every method is a function of its arguments."""

    @property
    def port(self) -> int:
        """Default port of the HTTP API."""

    @property
    def module(self) -> str:
        """Python module that starts the server."""

    @property
    def health_path(self) -> str:
        """HTTP path of the health check, which must not run the model."""

    @property
    def load_seconds(self) -> int:
        """Seconds that a model may take to load."""

    @property
    def algorithms(self) -> Sequence[Algorithm]:
        """The algorithms of speculative decoding that some version supports."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that every process needs."""

    @property
    def cache_variables(self) -> Mapping[str, str]:
        """Environment variables with directories for what the engine compiles, and a folder name for each."""

    @property
    def api_key_variable(self) -> str | None:
        """Environment variable with the API key that clients must send; None if only --api-key sets it."""

    def image(self, image: str | None, version: str | None) -> str:
        """The container image: `image` if set, otherwise the project's image of that version."""

    def version(self, image: str | None, version: str | None) -> str:
        """The engine's version: `version` if set, otherwise from the image's tag, otherwise the default."""

    def check_version(self, version: str) -> None:
        """Raises EngineError if the version is older than the oldest supported one."""

    def check_launch(
        self, launch: Launch, image: str | None, version: str | None, arguments: Sequence[str] = ()
    ) -> None:
        """Raises EngineError if the engine does not support the launch.

        image, version: as for `version`. arguments: those of the user.
        """

    def check_arguments(
        self, arguments: Sequence[str], speculation: Speculation | None, *, prefix_cache: bool = False
    ) -> None:
        """Raises EngineError if a user's arguments contain a flag that is set elsewhere or not supported.

        speculation: None for greedy decoding, for which flags of speculative decoding are refused.
        prefix_cache: whether the engine shares a prefix cache, whose flags are then refused.
        """

    def unshareable(
        self, version: str, speculation: Speculation, arguments: Mapping[PoolName, Sequence[str]]
    ) -> Unshareable | None:
        """Why the engines of the two pools cannot share a prefix cache; None if they can.

        speculation: of the speculative pool. arguments: the user's arguments of each pool.
        """

    def loads_plugin(self, version: str) -> bool:
        """Whether this version can load the plugin dps_sglang, which separates the tenants of /v1/messages."""

    def memory_arguments(self, launch: Launch, arguments: Sequence[str]) -> list[str]:
        """Flags that limit the engine's GPU memory, if its own default is not right for the launch.

        arguments: a user's arguments, which take precedence. Raises EngineError if two engines cannot share a GPU.
        """

    def memory_warning(self, launch: Launch, arguments: Sequence[str]) -> str:
        """Why the models probably do not fit into the GPUs; empty if they do, or if their sizes are not known.

        arguments: a user's arguments, some of which change the sizes.
        """

    def host_cache_bytes(self, launch: Launch, line: Sequence[str]) -> int:
        """The host memory in which the engine keeps copies of KV, in bytes.

        line: the whole command line. Raises EngineError if a size in it is invalid.
        """

    def arguments(self, launch: Launch) -> list[str]:
        """The server's command line. Raises EngineError if the launch is incomplete."""
