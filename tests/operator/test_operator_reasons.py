"""Every condition reason that the operator's source contains is explained in docs/troubleshooting.md."""

import ast
import re
from pathlib import Path

import dps_operator
from dps_operator.diagnose import SEVERITY
from dps_testkit.paths import ROOT

SOURCE = Path(dps_operator.__file__).parent
REASON_POSITION = {"Verdict": 2, "Problem": 0}
"""The position of the reason among the arguments of each class that has one."""


def reasons() -> set[str]:
    found = set(SEVERITY)
    for name in ("conditions.py", "diagnose.py"):
        for node in ast.walk(ast.parse((SOURCE / name).read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in REASON_POSITION
            ):
                reason = node.args[REASON_POSITION[node.func.id]]
                if isinstance(reason, ast.Constant):
                    found.add(str(reason.value))
    return found


def test_reasons_are_found() -> None:
    assert {"Serving", "Settled", "ProgressDeadlineExceeded", "WaitingForGPU"} <= reasons()


def test_every_reason_is_explained() -> None:
    explained = set(re.findall(r"`([A-Z]\w+)`", (ROOT / "docs/troubleshooting.md").read_text()))
    assert reasons() - explained == set()
