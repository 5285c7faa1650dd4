"""Versions and images of engines."""

import re

from dps_engines.launch import EngineError


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release, for comparison: (0, 5, 23) for 0.5.23.post1."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def version_of(image: str | None) -> str | None:
    """The version in the tag of a container image; None if there is none."""
    tag = re.search(r":v?(\d+\.\d+\.\d+(?:\.post\d+)?)[^/]*$", image or "")
    return tag.group(1) if tag else None


class Released:
    """The methods of dps_engines.runtime.EngineRuntime about images and versions."""

    title: str
    """The name of the engine in messages."""
    repository: str
    """The repository of the project's images, whose tags are `v` and the version."""
    default_version: str
    oldest_supported: tuple[int, ...]

    def image(self, image: str | None, version: str | None) -> str:
        """See EngineRuntime."""
        return image or f"{self.repository}:v{version or self.default_version}"

    def version(self, image: str | None, version: str | None) -> str:
        """See EngineRuntime."""
        return version or version_of(image) or self.default_version

    def check_version(self, version: str) -> None:
        """See EngineRuntime."""
        if numbers(version) < self.oldest_supported:
            oldest = ".".join(map(str, self.oldest_supported))
            raise EngineError(f"{self.title} {version} is not supported; use {oldest} or newer")
