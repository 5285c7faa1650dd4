"""Writes what test_operator_children compares with: python -m dps_testkit.operator.golden.

Read the difference before it is committed: it is what running deployments are going to get.
"""

from typing import Any

import yaml

from dps_operator.builders.children import children
from dps_testkit.operator.routers import EVERYTHING, SETTINGS, SMALLEST, router
from dps_testkit.paths import ROOT

HERE = ROOT / "tests/operator/fixtures"
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
