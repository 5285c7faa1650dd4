"""The alert rules pass their promtool tests (alerts.yaml), and helm renders rules and dashboard unchanged."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from dps_testkit.cluster.kube import BIN
from dps_testkit.dashboard import dashboard
from e2e.metrics.prometheus import HERE, ROOT, RULES, SECONDS, binary

UNIT_TESTS = HERE / "alerts.yaml"


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [binary("promtool"), *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_pass_their_promtool_unit_tests() -> None:
    promtool("test", "rules", UNIT_TESTS)


def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    alerts = {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }
    cases = [
        case for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"] for case in test["alert_rule_test"]
    ]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts


def rendered(name: str) -> dict[str, Any]:
    """The object that helm renders for one of the values under `monitoring`."""
    command = [str(BIN / "helm"), "template", "dps", str(ROOT / "charts/dps-router")]
    command += ["--show-only", "templates/monitoring.yaml", "--set", f"monitoring.{name}.enabled=true"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    (manifest,) = [document for document in yaml.safe_load_all(done.stdout) if document]
    result: dict[str, Any] = manifest
    return result


def test_helm_renders_the_rules_unchanged(tmp_path: Path) -> None:
    rules = rendered("prometheusRule")["spec"]
    assert rules == yaml.safe_load(RULES.read_text())
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules))
    promtool("check", "rules", file)


def test_helm_renders_the_dashboard_unchanged() -> None:
    assert json.loads(rendered("dashboard")["data"]["dps-router.json"]) == dashboard()
