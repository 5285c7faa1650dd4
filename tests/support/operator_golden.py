"""Writes what test_operator_children compares with: PYTHONPATH=tests python -m support.operator_golden.

Read the difference before it is committed: it is what running deployments are going to get.
"""

from pathlib import Path
from typing import Any

import yaml
from support.operator_wanted import EVERYTHING, SETTINGS, SMALLEST, router

from dps_operator.builders.children import children

HERE = Path(__file__).parents[1] / "operator/fixtures"
CASES: dict[str, dict[str, Any]] = {"smallest": SMALLEST, "everything": EVERYTHING}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def rendered(spec: dict[str, Any]) -> str:
    """All children of a DPSRouter of that spec, as YAML."""
    made = children(router(spec), SETTINGS, "secret-uid")
    return yaml.dump_all(made, Dumper=_Dumper, sort_keys=False, width=110)


if __name__ == "__main__":
    for name, spec in CASES.items():
        (HERE / f"{name}.yaml").write_text(rendered(spec))
