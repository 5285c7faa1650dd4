"""Fenced blocks of the documentation, and the HTML comment before each that names what runs it.

A block of shell commands is preceded by one of

    <!-- run by PATH -->        PATH, a test or script of this repository, runs the block
    <!-- not run: REASON -->    nothing runs it, for the given reason

and a block that commands need or print by one of

    <!-- file: NAME -->         the content of a file that later commands read
    <!-- output -->             lines that the block before it prints
"""

import re
from dataclasses import dataclass
from pathlib import Path

from dps_testkit.paths import ROOT

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "charts/dps-router/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
)
"""Paths below the repository's root."""

_BLOCK = re.compile(
    r"^(?:<!-- (?P<marker>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is the line of its fence, `marker` the comment before it, or empty."""

    document: str
    line: int
    language: str
    text: str
    marker: str

    @property
    def runner(self) -> str | None:
        """The path of the test or script that runs the block, or None."""
        return self._after("run by ")

    @property
    def reason_not_run(self) -> str | None:
        return self._after("not run: ")

    @property
    def file(self) -> str | None:
        """The name of the file whose content the block is, or None."""
        return self._after("file: ")

    def _after(self, prefix: str) -> str | None:
        return self.marker.removeprefix(prefix) if self.marker.startswith(prefix) else None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str) -> list[Block]:
    """All fenced blocks of a document, in order."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [
        Block(
            document,
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["text"],
            match["marker"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def all_blocks() -> list[Block]:
    """The fenced blocks of every document that exists."""
    return [block for document in DOCUMENTS if (ROOT / document).exists() for block in blocks(document)]


def run_by(runner: Path) -> list[Block]:
    """The blocks that `runner`, a file of this repository, has to run."""
    path = str(runner.resolve().relative_to(ROOT))
    return [block for block in all_blocks() if block.runner == path]
