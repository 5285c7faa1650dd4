"""Field-by-field comparison of the shapes of answers (observe.py), except for deliberate differences."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dps_testkit.engine_contract.observe import Shape

ABSENT = "<absent>"


@dataclass(frozen=True)
class KnownDifference:
    """A deliberate difference. `pattern` is an `fnmatch` pattern for the case name and field path.

    `lacking`: applies only if the emulated answer lacks the field.
    """

    pattern: str
    reason: str
    lacking: bool = False

    def explains(self, path: str, emulated: Shape) -> bool:
        """Whether this entry explains the difference at `path`."""
        return fnmatchcase(path, self.pattern) and (emulated == ABSENT or not self.lacking)


def differences(real: Shape, emulated: Shape, path: str = "") -> Iterator[tuple[str, Shape, Shape]]:
    """Yield (path, real, emulated) for each field that differs; a missing field is `ABSENT`."""
    match real, emulated:
        case dict(), dict():
            for key in real | emulated:
                yield from differences(real.get(key, ABSENT), emulated.get(key, ABSENT), f"{path}.{key}")
        case list(), list() if len(real) == len(emulated):
            for index, (left, right) in enumerate(zip(real, emulated, strict=True)):
                yield from differences(left, right, f"{path}.{index}")
        case _ if real != emulated:
            yield path, real, emulated


def unexplained(
    real: Mapping[str, Shape], emulated: Mapping[str, Shape], deliberate: tuple[KnownDifference, ...]
) -> dict[str, tuple[Shape, Shape]]:
    """Differences that no entry of `deliberate` explains, for the cases in `emulated`."""
    return {
        path: (expected, actual)
        for path, expected, actual in _all(real, emulated)
        if not any(known.explains(path, actual) for known in deliberate)
    }


def unused(
    real: Mapping[str, Shape], emulated: Mapping[str, Shape], deliberate: tuple[KnownDifference, ...]
) -> list[str]:
    """Patterns of `deliberate` that no longer explain any difference."""
    found = [(path, other) for path, _, other in _all(real, emulated)]
    return [
        known.pattern for known in deliberate if not any(known.explains(path, other) for path, other in found)
    ]


def _all(real: Mapping[str, Shape], emulated: Mapping[str, Shape]) -> Iterator[tuple[str, Shape, Shape]]:
    for name, shape in emulated.items():
        yield from differences(real.get(name, ABSENT), shape, name)
