"""Renders the chart without Helm: the part of Go's template language that charts/dps-router uses.

A function or construct that is not implemented raises ChartError. The end-to-end tests compare the result with
`helm template`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dps_testkit.operator.golden import NoAliasDumper

ACTION = re.compile(r"\{\{(-\s)?\s*(.*?)\s*(\s-)?\}\}", re.DOTALL)
TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|:=|[|()]|[^\s|()"]+)')
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class ChartError(Exception):
    """The chart uses something that is not implemented here, or requires a value that is not set."""


@dataclass
class Node:
    """Text, an expression, or a block with its branches."""

    keyword: str
    expression: str
    body: list["Node"] = field(default_factory=list)
    otherwise: list["Node"] = field(default_factory=list)


def _lex(source: str) -> Iterator[Node]:
    position, trim = 0, False
    for match in ACTION.finditer(source):
        text = source[position : match.start()]
        text = text.lstrip() if trim else text
        yield Node("text", text.rstrip() if match[1] else text)
        position, trim = match.end(), bool(match[3])
        expression = match[2]
        if COMMENT.fullmatch(expression):
            continue
        keyword, _, rest = expression.partition(" ")
        if keyword in ("if", "range", "with", "define", "else", "end"):
            yield Node(keyword, rest.strip())
        else:
            yield Node("expression", expression)
    text = source[position:]
    yield Node("text", text.lstrip() if trim else text)


def parse(source: str) -> list[Node]:
    """The nodes of a template."""
    root = Node("root", "")
    stack, targets = [root], [root.body]
    for node in _lex(source):
        if node.keyword == "end":
            stack.pop()
            targets.pop()
        elif node.keyword == "else":
            if node.expression:
                raise ChartError(f"else {node.expression}: only a plain else is implemented")
            targets[-1] = stack[-1].otherwise
        else:
            targets[-1].append(node)
            if node.keyword in ("if", "range", "with", "define"):
                stack.append(node)
                targets.append(node.body)
    if len(stack) != 1:
        raise ChartError(f"{stack[-1].keyword} {stack[-1].expression}: the block has no end")
    return root.body


class _Dumper(NoAliasDumper):
    """Writes strings as Go's encoder does."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """A string as Go's encoder writes it: in double quotes if it would otherwise be read as another type."""
    resolved: str = dumper.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    ambiguous = resolved != "tag:yaml.org,2002:str"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if ambiguous else None)


_Dumper.add_representer(str, _string)


def to_yaml(value: Any) -> str:
    """YAML as Helm's toYaml writes it: sorted keys, no line break at the end."""
    return yaml.dump(value, Dumper=_Dumper, width=80, allow_unicode=True).removesuffix("\n...\n").rstrip("\n")


def _indent(width: int, text: str) -> str:
    return "\n".join(" " * width + line if line else line for line in text.split("\n"))


def _required(message: str, value: Any) -> Any:
    if value in (None, ""):
        raise ChartError(message)
    return value


def _set(target: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    target[key] = value
    return target


def _printf(template: str, *values: Any) -> str:
    return template % values


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "contains": lambda part, text: part in text,
    "default": lambda value, given=None: given or value,
    "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "fromYaml": yaml.safe_load,
    "gt": lambda left, right: left > right,
    "int": int,
    "join": lambda separator, items: separator.join(map(str, items)),
    "list": lambda *items: list(items),
    "merge": lambda *parts: dict(item for part in reversed(parts) for item in part.items()),
    "nindent": lambda width, text: "\n" + _indent(width, text),
    "printf": _printf,
    "quote": lambda value: '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"',
    "required": _required,
    "set": _set,
    "toYaml": to_yaml,
    "trimSuffix": lambda suffix, text: text.removesuffix(suffix),
    "trunc": lambda length, text: text[:length],
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "not": lambda value: not value,
    "or": lambda *values: next((value for value in values if value), values[-1]),
}


class Renderer:
    """Renders templates with one set of named templates. `context` is the value of `$`."""

    def __init__(self, context: Any) -> None:
        self._root = context
        self._named: dict[str, list[Node]] = {}

    def define(self, source: str) -> None:
        """Read the named templates of a file."""
        for node in parse(source):
            if node.keyword == "define":
                self._named[node.expression.strip('"')] = node.body

    def render(self, source: str) -> str:
        """The text of a template."""
        return self._render(parse(source), self._root, {"$": self._root})

    def _render(self, nodes: list[Node], dot: Any, variables: dict[str, Any]) -> str:
        return "".join(self._node(node, dot, variables) for node in nodes)

    def _node(self, node: Node, dot: Any, variables: dict[str, Any]) -> str:
        if node.keyword == "text":
            return node.expression
        if node.keyword == "define":
            return ""
        if node.keyword == "expression":
            name, assigned, expression = node.expression.partition(":=")
            if assigned:
                variables[name.strip()] = self._evaluate(expression, dot, variables)
                return ""
            value = self._evaluate(node.expression, dot, variables)
            return str(value).lower() if isinstance(value, bool) else str(value)
        value = self._evaluate(node.expression, dot, variables)
        if not value:
            return self._render(node.otherwise, dot, dict(variables))
        if node.keyword == "range":
            return "".join(self._render(node.body, item, dict(variables)) for item in value)
        return self._render(node.body, value if node.keyword == "with" else dot, dict(variables))

    def _evaluate(self, expression: str, dot: Any, variables: dict[str, Any]) -> Any:
        tokens = TOKEN.findall(expression.strip())
        value, rest = self._pipeline(tokens, dot, variables)
        if rest:
            raise ChartError(f"{expression}: unexpected {rest[0]}")
        return value

    def _pipeline(self, tokens: list[str], dot: Any, variables: dict[str, Any]) -> tuple[Any, list[str]]:
        """The value of `command | command …`, and the tokens that follow it.

        The value of a command is the last operand of the next command.
        """
        piped: list[Any] = []
        while True:
            head, tokens = self._head(tokens, dot, variables)
            operands: list[Any] = []
            while tokens and tokens[0] not in ("|", ")"):
                operand, tokens = self._operand(tokens, dot, variables)
                operands.append(operand)
            value = head(*operands, *piped) if callable(head) else head
            if not tokens or tokens[0] == ")":
                return value, tokens
            piped, tokens = [value], tokens[1:]

    def _head(self, tokens: list[str], dot: Any, variables: dict[str, Any]) -> tuple[Any, list[str]]:
        """The first word of a command: a function, or a value."""
        if tokens[0] == "include":
            return self._include, tokens[1:]
        if tokens[0] in FUNCTIONS:
            return FUNCTIONS[tokens[0]], tokens[1:]
        return self._operand(tokens, dot, variables)

    def _operand(self, tokens: list[str], dot: Any, variables: dict[str, Any]) -> tuple[Any, list[str]]:
        if tokens[0] != "(":
            return self._value(tokens[0], dot, variables), tokens[1:]
        value, rest = self._pipeline(tokens[1:], dot, variables)
        return value, rest[1:]

    def _include(self, name: str, context: Any) -> str:
        return self._render(self._named[name], context, {"$": context})

    def _value(self, token: str, dot: Any, variables: dict[str, Any]) -> Any:
        if token.startswith('"'):
            return token[1:-1].replace('\\"', '"')
        if token.isdigit():
            return int(token)
        if token in ("true", "false"):
            return token == "true"
        start, *path = token.split(".")
        if start and start not in variables:
            raise ChartError(f"{token}: no such function or variable is implemented")
        value = variables[start] if start else dot
        for name in filter(None, path):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
        return value


@dataclass(frozen=True)
class _Files:
    """`.Files` of a chart."""

    chart: Path

    def Get(self, path: str) -> str:  # noqa: N802 - the name that templates use
        """The text of a file of the chart."""
        return (self.chart / path).read_text(encoding="utf-8")


def rendered(chart: Path, release: str, namespace: str, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The chart's objects as (template, YAML text), in the order of the templates' names. Tests are left out."""
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    context = {
        "Chart": {
            "Name": metadata["name"],
            "Version": metadata["version"],
            "AppVersion": metadata["appVersion"],
        },
        "Files": _Files(chart),
        "Release": {"Name": release, "Namespace": namespace, "Service": "Helm"},
        "Values": values,
    }
    renderer = Renderer(context)
    templates = sorted((chart / "templates").iterdir())
    for path in templates:
        if path.suffix == ".tpl":
            renderer.define(path.read_text(encoding="utf-8"))
    objects = []
    for path in templates:
        if path.suffix == ".yaml":
            text = renderer.render(path.read_text(encoding="utf-8"))
            documents = re.split(r"^---\n", text, flags=re.MULTILINE)
            objects += [
                (path.name, part.strip("\n")) for part in documents if yaml.safe_load(part) is not None
            ]
    return objects
