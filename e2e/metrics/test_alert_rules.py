"""The alert rules by promtool: their unit tests (alerts.yaml), and what helm makes of them."""

import subprocess
from pathlib import Path

import yaml

from e2e.cluster.harness import BIN
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


def test_helm_hands_them_on_as_they_are(tmp_path: Path) -> None:
    values = "monitoring.prometheusRule.enabled=true"
    command = [str(BIN / "helm"), "template", "dps", str(ROOT / "charts/dps-router"), "--set", values]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS).stdout
    (made,) = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "PrometheusRule"]
    assert made["spec"] == yaml.safe_load(RULES.read_text())
    rendered = tmp_path / "rules.yaml"
    rendered.write_text(yaml.safe_dump(made["spec"]))
    promtool("check", "rules", rendered)
