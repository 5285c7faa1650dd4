"""Progress of a replay: a bar on a terminal, otherwise a few lines."""

from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from dps_lab.replay.records import TurnRecord

LINES = 5
"""Number of progress lines per replay if the output is not a terminal."""


class Progress:
    """A context manager that counts and displays completed turns."""

    def __init__(self, console: Console, label: str, turns: int) -> None:
        self._console = console
        self._label = label
        self._turns = turns
        self._pools: Counter[str] = Counter()
        self._retries = 0
        self._done = 0
        self._bar = RichProgress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[counts]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=turns, counts="")

    def turn_ended(self, record: TurnRecord) -> None:
        """Count a completed turn."""
        self._done += 1
        self._retries += record.attempts - 1
        if record.verdict.pool is not None:
            self._pools[record.verdict.pool] += 1
        self._bar.update(self._task, advance=1, counts=self._counts())
        if not self._console.is_terminal and self._done % max(1, self._turns // LINES) == 0:
            self._console.print(f"{self._label}: {self._done} of {self._turns} turns, {self._counts()}")

    def event(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text)

    def _counts(self) -> str:
        counts = [f"{count} {pool}" for pool, count in sorted(self._pools.items())]
        retries = [f"{self._retries} retries"] if self._retries else []
        return ", ".join(counts + retries)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
