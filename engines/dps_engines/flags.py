"""Command-line flags that are derived from a launch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dps_engines.launch import Launch

Value = str | int | float | bool | Sequence[str] | None


@dataclass(frozen=True)
class Flag:
    """One flag: its name, the field of a DPSRouter that sets it, its value, and other names of the same flag.

    The flag is omitted if the value is None, False or an empty list, and has no argument if the value is True.
    """

    name: str
    source: str
    value: Callable[[Launch], Value]
    aliases: tuple[str, ...] = ()


def sources(flags: Iterable[Flag]) -> dict[str, str]:
    """The field that sets each flag, by every name of the flag."""
    return {name: flag.source for flag in flags for name in (flag.name, *flag.aliases)}


def arguments(launch: Launch, flags: Iterable[Flag]) -> list[str]:
    """The command line of a launch. Raises EngineError if a required draft model is missing."""
    line: list[str] = []
    for flag in flags:
        value = flag.value(launch)
        if value is None or value is False or value == []:
            continue
        if isinstance(value, Sequence) and not isinstance(value, str):
            line += [flag.name, *value]
        else:
            line += [flag.name] if value is True else [flag.name, str(value)]
    return line
