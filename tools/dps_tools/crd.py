"""The CustomResourceDefinition, generated from the API models: structural schema, defaults, CEL rules, columns."""

from typing import Any

from dps_operator.api import (
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    APIObject,
    Spec,
    Status,
    validations,
)

JSON = dict[str, Any]

SHORT_NAME = "dps"
CATEGORY = "inference"
LONGEST_NAME = 50
"""Longest name of a DPSRouter, in characters: `<name>-speculative` must be a valid Service name."""

COPIED = (
    "type",
    "format",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "required",
)

STRUCTURE = frozenset(
    {
        *("title", "description", "const", "default", "exclusiveMinimum"),
        *("anyOf", "properties", "additionalProperties", "items"),
    }
)
"""Keywords that are omitted or converted. Those of COPIED are copied, and any other is refused."""

COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Policy", "string", ".status.routing.policy", 0),
    ("Threshold", "integer", ".status.routing.thresholdTokens", 0),
    ("Speculative", "integer", ".status.pools.speculative.readyReplicas", 0),
    ("Greedy", "integer", ".status.pools.greedy.readyReplicas", 0),
    ("Gateway", "integer", ".status.gateway.readyReplicas", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', 1),
    ("URL", "string", ".status.url", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def _merged(node: JSON, definitions: JSON) -> tuple[JSON, bool]:
    """The schema with its references resolved, and whether null is allowed. Siblings of a reference take precedence."""
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[1]]
        return _merged(target | {key: value for key, value in node.items() if key != "$ref"}, definitions)
    options = node.get("anyOf", [])
    if {"type": "null"} not in options:
        return node, False
    (option,) = [option for option in options if option != {"type": "null"}]
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    return _merged(option, definitions)[0] | rest, True


def structural(node: JSON, definitions: JSON) -> JSON:
    """Pydantic's JSON schema as a structural schema, which CRDs require.

    An optional field may be omitted; it is nullable only if null differs from its default. Raises ValueError for a
    keyword that is neither copied nor converted, because its constraint would be missing in the CRD.
    """
    merged, nullable = _merged(node, definitions)
    for keyword in merged:
        if keyword not in COPIED and keyword not in STRUCTURE and not keyword.startswith("x-kubernetes-"):
            raise ValueError(
                f"the CRD cannot express {keyword}; use the limits ge, gt, le, min_length, max_length or pattern, "
                "or a CEL rule"
            )
    result: JSON = {}
    if "description" in merged:
        result["description"] = " ".join(merged["description"].split())
    result |= {key: merged[key] for key in COPIED if key in merged}
    if "exclusiveMinimum" in merged:
        result |= {"minimum": merged["exclusiveMinimum"], "exclusiveMinimum": True}
    result |= {key: value for key, value in merged.items() if key.startswith("x-kubernetes-")}
    if "const" in merged:
        result["enum"] = [merged["const"]]
    default = merged.get("default")
    if default is not None:
        result["default"] = {} if isinstance(default, dict) else default
        if nullable:
            result["nullable"] = True
    if "x-kubernetes-int-or-string" in result:
        result["anyOf"] = merged["anyOf"]
    elif merged.get("type") == "object":
        extra = merged.get("additionalProperties")
        if "properties" in merged:
            result["properties"] = {
                name: structural(child, definitions) for name, child in merged["properties"].items()
            }
        elif isinstance(extra, dict):
            result["additionalProperties"] = structural(extra, definitions)
        else:
            result["x-kubernetes-preserve-unknown-fields"] = True
    elif merged.get("type") == "array":
        result.setdefault("x-kubernetes-list-type", "atomic")
        result["items"] = structural(merged["items"], definitions)
    return result


def schema(model: type[APIObject]) -> JSON:
    """The structural schema of one model."""
    whole = model.model_json_schema(by_alias=True)
    definitions = whole.pop("$defs", {})
    return structural(whole, definitions)


def object_schema() -> JSON:
    """The schema of a DPSRouter. Only rules at this level can refer to the object's name."""
    named = validations(
        (
            f"size(self.metadata.name) <= {LONGEST_NAME}",
            f"metadata.name must have at most {LONGEST_NAME} characters, because the names of its child "
            "objects start with it",
        ),
        (
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must start with a letter, end with a letter or a digit, and contain only a-z, 0-9 and -",
        ),
    )
    return {
        "description": "Routes each turn of a session to speculative or greedy engines.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": schema(Spec),
            "status": schema(Status) | {"required": []},
        },
        **named,
    }


def crd() -> JSON:
    """The CustomResourceDefinition `dpsrouters.dpsrouter.io`."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": object_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.gateway.replicas",
                "statusReplicasPath": ".status.gateway.replicas",
                "labelSelectorPath": ".status.gateway.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
            for name, kind, path, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "dps-router", "app.kubernetes.io/part-of": "dps-router"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
                "categories": [CATEGORY],
            },
            "versions": [version],
        },
    }
