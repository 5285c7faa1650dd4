"""The alert rules by promtool: their unit tests (alerts.yaml); and what helm makes of them and the dashboard."""

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


def test_every_alert_comes_in_its_time_with_its_words_and_not_in_health() -> None:
    promtool("test", "rules", UNIT_TESTS)


def test_every_alert_has_a_unit_test_in_which_it_comes_and_one_in_which_it_does_not() -> None:
    alerts = {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }
    cases = [
        case for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"] for case in test["alert_rule_test"]
    ]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts


def rendered(what: str) -> dict[str, Any]:
    """What helm makes of one of the chart's values under `monitoring`; its one object."""
    command = [str(BIN / "helm"), "template", "dps", str(ROOT / "charts/dps-router")]
    command += ["--show-only", "templates/monitoring.yaml", "--set", f"monitoring.{what}.enabled=true"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    (made,) = [item for item in yaml.safe_load_all(done.stdout) if item]
    result: dict[str, Any] = made
    return result


def test_helm_hands_the_rules_on_as_they_are(tmp_path: Path) -> None:
    made = rendered("prometheusRule")["spec"]
    assert made == yaml.safe_load(RULES.read_text())
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(made))
    promtool("check", "rules", file)


def test_helm_hands_the_dashboard_on_as_it_is() -> None:
    assert json.loads(rendered("dashboard")["data"]["dps-router.json"]) == dashboard()
