"""Field-by-field comparison of two shapes, less the differences that are meant to be there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dps_testkit.engine_contract.observe import Shape

ABSENT = "<absent>"


@dataclass(frozen=True)
class Deliberate:
    """Fields that differ on purpose, and why: ``pattern`` is `fnmatch`'s, over case and path.

    ``lacking``: only where the emulation has no such field.
    """

    pattern: str
    reason: str
    lacking: bool = False

    def explains(self, path: str, emulated: Shape) -> bool:
        """Whether this is the difference at ``path``."""
        return fnmatchcase(path, self.pattern) and (emulated == ABSENT or not self.lacking)


def differences(real: Shape, emulated: Shape, path: str = "") -> Iterator[tuple[str, Shape, Shape]]:
    """Every field that differs, as (path, real, emulated); what one side lacks is ``ABSENT``."""
    match real, emulated:
        case dict(), dict():
            for key in real | emulated:
                yield from differences(real.get(key, ABSENT), emulated.get(key, ABSENT), f"{path}.{key}")
        case list(), list() if len(real) == len(emulated):
            for index, (one, other) in enumerate(zip(real, emulated, strict=True)):
                yield from differences(one, other, f"{path}.{index}")
        case _ if real != emulated:
            yield path, real, emulated


def unexplained(
    real: Mapping[str, Shape], emulated: Mapping[str, Shape], deliberate: tuple[Deliberate, ...]
) -> dict[str, tuple[Shape, Shape]]:
    """Differences of the cases that ``emulated`` has, which no entry of ``deliberate`` explains."""
    return {
        path: (one, other)
        for path, one, other in _all(real, emulated)
        if not any(known.explains(path, other) for known in deliberate)
    }


def unused(
    real: Mapping[str, Shape], emulated: Mapping[str, Shape], deliberate: tuple[Deliberate, ...]
) -> list[str]:
    """Patterns of ``deliberate`` that explain no difference any more."""
    found = [(path, other) for path, _, other in _all(real, emulated)]
    return [
        known.pattern for known in deliberate if not any(known.explains(path, other) for path, other in found)
    ]


def _all(real: Mapping[str, Shape], emulated: Mapping[str, Shape]) -> Iterator[tuple[str, Shape, Shape]]:
    for name, shape in emulated.items():
        yield from differences(real.get(name, ABSENT), shape, name)
