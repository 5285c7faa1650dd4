"""Normalize type names in tool schemas (`dict`, `float`, `varchar(255)`) as SGLang does.

The prompt contains the normalized schema. `normalized_schema` is equivalent to `normalize_json_schema_types` in
SGLang 0.5.23's function_call/utils.py. This module performs no I/O.
"""

from typing import Any, Final

MAX_MIXED_TYPES: Final = 64
"""Limit of the length of a `type` list that does not contain only strings, because its values are compared in pairs."""

STANDARD_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
ALIASES: Final = {
    alias: standard
    for standard, aliases in {
        "string": "str text varchar char enum uuid date datetime time timestamp binary blob bytea bytes varbinary",
        "boolean": "bool",
        "integer": "bigint smallint tinyint",
        "number": "double decimal real numeric",
        "array": "arr tuple set",
        "object": "map",
    }.items()
    for alias in aliases.split()
}
PREFIXES: Final = {
    "int": "integer", "uint": "integer", "long": "integer", "short": "integer", "unsigned": "integer",
    "num": "number", "float": "number", "list": "array", "dict": "object",
}  # fmt: skip
AFTER_PREFIX: Final = frozenset("0123456789[<( \t")

SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS: Final = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip


def normalized_schema(schema: Any) -> Any:
    """`schema` with every known alias of a JSON Schema type replaced by that type. Key order is preserved.

    Raises ValueError for an invalid `type` list with more than MAX_MIXED_TYPES values.
    """
    if isinstance(schema, list):
        return [normalized_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _normalized_entry(key, value) for key, value in schema.items()}


def _normalized_entry(key: str, value: Any) -> Any:
    if key == "type" and isinstance(value, str):
        return _normalized_type(value)
    if key == "type" and isinstance(value, list):
        types = [_normalized_type(item) for item in value]
        if all(isinstance(item, str) for item in types):
            return list(dict.fromkeys(types))
        if len(types) > MAX_MIXED_TYPES:
            raise ValueError("a type list is too long")
        return [item for index, item in enumerate(types) if item not in types[:index]]
    if key in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: normalized_schema(item) for name, item in value.items()}
    if key in SCHEMAS or (key in SCHEMA_LISTS and isinstance(value, list)):
        return normalized_schema(value)
    return value


def _normalized_type(name: Any) -> Any:
    if not isinstance(name, str) or name in STANDARD_TYPES:
        return name
    base = name.split("(", 1)[0].strip().lower()
    if base in STANDARD_TYPES:
        return base
    if base in ALIASES:
        return ALIASES[base]
    for prefix, standard in PREFIXES.items():
        if base == prefix or (base.startswith(prefix) and base[len(prefix)] in AFTER_PREFIX):
            return standard
    return name
