"""The children of some DPSRouters as YAML, kept in tests/operator/fixtures.

`make generate` rewrites them. Review the difference before you commit it: running deployments will be changed in the
same way.
"""

from typing import Any

import yaml

from dps_operator.build import children
from dps_testkit.operator.routers import EVERYTHING, SETTINGS, SMALLEST, router
from dps_testkit.paths import ROOT

HERE = ROOT / "tests/operator/fixtures"
CASES: dict[str, dict[str, Any]] = {"smallest": SMALLEST, "everything": EVERYTHING}


class NoAliasDumper(yaml.SafeDumper):
    """Writes repeated objects in full instead of as YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def rendered(spec: dict[str, Any]) -> str:
    """All child objects of a DPSRouter with this spec, as YAML."""
    manifests = children(router(spec), SETTINGS, "secret-uid")
    return yaml.dump_all(manifests, Dumper=NoAliasDumper, sort_keys=False, width=110)
