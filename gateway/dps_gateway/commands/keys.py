"""`dps keys`: add, list and revoke the API keys in the gateway's key file."""

import argparse
import fcntl
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dps_gateway.auth import HASHED, KEY_OPTIONS, Key, digest_of, parse_key, read_key_file
from dps_gateway.config import ConfigError

KEY_BYTES: Final = 32
NEW_FILE_MODE: Final = 0o600


def main(argv: list[str]) -> int:
    """`dps keys add|list|revoke --file FILE`. A running gateway applies a changed file within seconds.

    Exit status: 0 after success, 1 if there is no key with the given id, 2 if an argument or the file is invalid.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (ConfigError, OSError, ValueError) as error:
        print(f"dps keys: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dps keys", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="add|list|revoke")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], description: str
    ) -> argparse.ArgumentParser:
        result = commands.add_parser(name, help=description, description=description)
        result.add_argument(
            "--file", type=Path, required=True, metavar="FILE", help="the key file (auth.keysFile)"
        )
        result.set_defaults(run=run)
        return result

    add = command("add", _add, "generate a key and print it; the file contains only its hash")
    add.add_argument("tenant", help="the tenant that the key identifies")
    for name, (field, _, metavar, text) in KEY_OPTIONS.items():
        add.add_argument(f"--{field.replace('_', '-')}", dest=name, metavar=metavar, help=text)
    command("list", _list, "list the keys with their ids, tenants and limits")
    revoke = command("revoke", _revoke, "remove a key")
    revoke.add_argument("id", help="the key's id, as printed by 'dps keys list'")
    return parser


def _add(arguments: argparse.Namespace) -> int:
    tenant: str = arguments.tenant
    if not tenant.isprintable() or ":" in tenant or tenant.startswith("#") or tenant.split() != [tenant]:
        raise ValueError(f"the tenant '{tenant}' must not contain a colon or white space, or begin with '#'")
    secret = "sk-" + secrets.token_urlsafe(KEY_BYTES)
    line = f"{tenant}:{HASHED}{digest_of(secret).hex()}"
    for name in KEY_OPTIONS:
        if (value := getattr(arguments, name)) is not None:
            if value.split() != [value]:
                raise ValueError(f"{name}={value} must not contain white space")
            line += f" {name}={value}"
    try:
        parse_key(line)
    except ValueError as error:
        raise ValueError(f"the new line {error}") from error
    with _edited(arguments.file, create=True) as lines:
        lines.append(line)
    print(secret)
    print("This key is not stored and cannot be shown again.", file=sys.stderr)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    limits = ("MAX IN FLIGHT", "REQUESTS/MIN", "TOKENS/MIN")
    rows: list[tuple[str, ...]] = [("ID", "TENANT", "EXPIRES", "MODELS", *limits, "URGENCY", "STORED AS")]
    rows += [_row(key) for _, key in read_key_file(arguments.file) if key is not None]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(key: Key) -> tuple[str, ...]:
    expires = "never" if key.expires is None else datetime.fromtimestamp(key.expires, UTC).isoformat()
    models = "all" if key.models is None else ",".join(sorted(key.models))
    limits = (key.max_in_flight, key.requests_per_minute, key.tokens_per_minute)
    shown = ("unlimited" if limit is None else str(limit) for limit in limits)
    urgency = "default" if key.urgency is None else str(key.urgency)
    stored = "hash" if key.hashed else "plain text"
    return key.id, key.tenant, expires, models, *shown, urgency, stored


def _revoke(arguments: argparse.Namespace) -> int:
    with _edited(arguments.file) as lines:
        kept = [line for line in lines if (key := parse_key(line)) is None or key.id != arguments.id]
        found = len(kept) < len(lines)
        lines[:] = kept
    if not found:
        print(f"dps keys: {arguments.file} has no key with the id {arguments.id}", file=sys.stderr)
    return 0 if found else 1


@contextmanager
def _edited(path: Path, *, create: bool = False) -> Iterator[list[str]]:
    """The lines of the key file, which is replaced atomically if they have changed when the block ends.

    The folder is locked, so that concurrent commands do not overwrite each other's changes.
    """
    path = path.resolve()  # a symbolic link stays one
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        exists = path.exists() or not create
        lines = [line for line, _ in read_key_file(path)] if exists else []
        before = list(lines)
        yield lines
        if lines != before:
            text = "".join(f"{line}\n" for line in lines)
            _replace(path, text, path.stat().st_mode & 0o777 if exists else NEW_FILE_MODE)
    finally:
        os.close(folder)


def _replace(path: Path, text: str, mode: int) -> None:
    """Replace a file, so that a reader sees either the old content or the new. Raises OSError.

    `mode`: the permissions of the new file.
    """
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:  # also when it is interrupted
            os.unlink(file.name)
            raise
