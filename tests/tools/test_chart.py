"""The subset of Go's template language that renders the chart without Helm."""

from typing import Any

import pytest
import yaml

from dps_operator.builders.credentials import CREDENTIALS
from dps_tools.chart import ChartError, Renderer, rendered
from dps_tools.generate import ROOT

CHART = ROOT / "charts/dps-router"
CONTEXT: dict[str, Any] = {
    "Values": {"name": "a", "empty": "", "list": ["x", "y"], "map": {"k": 1}, "on": True}
}

TEMPLATES = {
    "field": ("{{ .Values.name }}", "a"),
    "surrounding white space is trimmed": ("b  {{- .Values.name -}}  c", "bac"),
    "comment": ("{{- /* nothing */ -}}x", "x"),
    "pipeline passes its value as the last argument": ('{{ .Values.name | printf "%s-%s" "b" }}', "b-a"),
    "parentheses": ("{{ quote (.Values.name) }}", '"a"'),
    "default": ('{{ .Values.empty | default "d" }}', "d"),
    "comparison": ("{{ if gt (int .Values.map.k) 0 }}1{{ end }}", "1"),
    "or": ("{{ if or .Values.empty .Values.list }}1{{ end }}", "1"),
    "if and else": ("{{ if .Values.empty }}1{{ else }}2{{ end }}", "2"),
    "with sets the dot": ("{{ with .Values.map }}{{ .k }}{{ $.Values.name }}{{ end }}", "1a"),
    "range": ("{{ range .Values.list }}<{{ . }}>{{ end }}", "<x><y>"),
    "variable": ("{{ $v := .Values.name }}{{ $v }}", "a"),
    "boolean": ("{{ .Values.on }}", "true"),
    "toYaml": ("m:{{ toYaml .Values.map | nindent 2 }}", "m:\n  k: 1"),
    "merge prefers the first": ('{{ toYaml (merge (dict "j" 2) .Values.map (dict "k" 3)) }}', "j: 2\nk: 1"),
    "ambiguous string": ('{{ toYaml (list "True" "x") }}', '- "True"\n- x'),
}


@pytest.mark.parametrize(("source", "expected"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_template_is_rendered_as_by_go(source: str, expected: str) -> None:
    assert Renderer(CONTEXT).render(source) == expected


def test_named_template_is_included_with_its_context() -> None:
    renderer = Renderer(CONTEXT)
    renderer.define('{{- define "t" -}}[{{ .name }}]{{- end -}}')
    assert renderer.render('{{ include "t" .Values }}') == "[a]"


@pytest.mark.parametrize(
    "source", ["{{ lookup .Values }}", "{{ if .Values }}", '{{ required "set it" .Values.empty }}']
)
def test_unsupported_or_incomplete_template_is_refused(source: str) -> None:
    with pytest.raises(ChartError):
        Renderer(CONTEXT).render(source)


@pytest.mark.parametrize(
    ("namespaces", "kinds"),
    [([], ["ClusterRole"]), (["a", "b"], ["Role", "Role"])],
    ids=["all namespaces", "named namespaces"],
)
def test_operator_may_access_only_its_own_secret_and_only_read_pods(
    namespaces: list[str], kinds: list[str]
) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | {"watchNamespaces": namespaces}
    objects = [yaml.safe_load(text) for _, text in rendered(CHART, "r", "ns", values)]
    roles = [item for item in objects if item["kind"] in ("Role", "ClusterRole")]
    own = [role for role in roles if role["metadata"]["name"] == "r-dps-router"]
    assert [role["kind"] for role in own] == kinds
    rules = [rule for role in roles for rule in role["rules"]]
    assert not [rule for rule in rules if "*" in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]]
    assert [rule for rule in rules if "secrets" in rule["resources"]] == [
        {
            "apiGroups": [""],
            "resources": ["secrets"],
            "resourceNames": [CREDENTIALS],
            "verbs": ["get", "create", "patch"],
        }
    ] * len(own)
    assert [rule["verbs"] for rule in rules if "pods" in rule["resources"]] == [
        ["get", "list", "watch"]
    ] * len(own)


def test_operator_has_its_own_and_the_global_pull_secrets_and_receives_the_latter() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["imagePullSecrets"] = [{"name": "own"}]
    values["global"]["imagePullSecrets"] = [{"name": "a"}, {"name": "b"}]
    objects = [yaml.safe_load(text) for _, text in rendered(CHART, "r", "ns", values)]
    (deployment,) = [item for item in objects if item["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "own"}, {"name": "a"}, {"name": "b"}]
    assert {"name": "DPS_OPERATOR_PULL_SECRETS", "value": "a,b,"} in pod["containers"][0]["env"]


def test_several_operator_pods_are_evicted_one_after_the_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    budgets = {}
    for replicas in (1, 2):
        objects = [
            yaml.safe_load(text) for _, text in rendered(CHART, "r", "ns", values | {"replicas": replicas})
        ]
        budgets[replicas] = [item["spec"] for item in objects if item["kind"] == "PodDisruptionBudget"]
    (budget,) = budgets[2]
    assert budgets[1] == []
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_values_select_the_charts_objects() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values |= {"watchNamespaces": ["a", "b"], "crds": {"enabled": False}}
    objects = [yaml.safe_load(text) for _, text in rendered(CHART, "r", "ns", values)]
    kinds = [item["kind"] for item in objects]
    assert kinds.count("Role") == kinds.count("RoleBinding") == 2
    assert "CustomResourceDefinition" not in kinds
    (deployment,) = [item for item in objects if item["kind"] == "Deployment"]
    assert deployment["metadata"] | {"labels": {}} == {
        "name": "r-dps-router",
        "namespace": "ns",
        "labels": {},
    }
