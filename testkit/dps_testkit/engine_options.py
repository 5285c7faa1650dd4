"""The command-line options of engines, recorded from their own parsers."""

import json
from typing import Any

from dps_testkit.paths import ROOT

Options = dict[str, dict[str, Any]]


def recorded_options(engine: str, version: str) -> Options:
    """The options of one version, by name."""
    file = ROOT / f"tests/engines/fixtures/{engine}-{version}-flags.json"
    found: Options = json.loads(file.read_text())
    return found


def check_accepted(options: Options, line: list[str]) -> None:
    """Assert that every option exists, accepts the number of values that it has here, and allows each value."""
    position = 0
    while position < len(line):
        option = options[line[position]]
        position += 1
        if option["nargs"] == 0:
            continue
        several = option["nargs"] in ("*", "+")
        while True:
            value = line[position]
            assert not value.startswith("--")
            assert option["choices"] is None or value in option["choices"]
            if option["type"] == "int":
                int(value)
            position += 1
            if not several or position == len(line) or line[position].startswith("--"):
                break
