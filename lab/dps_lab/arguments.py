"""Numbers on the command lines of the lab. The functions are the `type` of an argparse argument."""

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def positive_int(text: str) -> int:
    """A whole number above 0. Raises ArgumentTypeError for other text."""
    return number(text, int, "a whole number above 0")


def positive_float(text: str) -> float:
    """A finite number above 0. Raises ArgumentTypeError for other text."""
    return number(text, float, "a number above 0")


def number(text: str, parse: Callable[[str], Number], expected: str, allow_zero: bool = False) -> Number:
    """A finite number above 0, or 0 if that is allowed.

    expected: the description of the argument in the error message. Raises ArgumentTypeError for other text.
    """
    try:
        value = parse(text)
        if 0 < value < float("inf") or (allow_zero and value == 0):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not {expected}")
