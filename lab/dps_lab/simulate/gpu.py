"""A GPU (or tensor-parallel group) in virtual time: engines that work on it at the same time share its time equally."""

from dataclasses import dataclass

from dps_lab.simulate.engine import VirtualEngine
from dps_local.emulated_sglang.scheduler import Sequence, Step


@dataclass
class _Running:
    step: Step
    remaining: float


class SharedGpu:
    """Processor sharing: with n steps in progress each one advances at 1/n of its speed."""

    def __init__(self, engines: list[VirtualEngine]) -> None:
        self.engines = engines
        self.version = 0
        """Changes when a step starts or ends, which invalidates an earlier `next_completion`."""
        self._running: dict[VirtualEngine, _Running] = {}
        self._now = 0.0

    def start_idle(self, now: float) -> bool:
        """Start a step on every idle engine that has work. Returns whether a step was started."""
        started = False
        for engine in self.engines:
            if engine not in self._running and (step := engine.next_step(now)):
                self._advance(now)
                self._running[engine] = _Running(step, step.seconds)
                started = True
        if started:
            self.version += 1
        return started

    def next_completion(self) -> float | None:
        """Time at which the next step ends, if no other one starts before; None if no step is running."""
        if not self._running:
            return None
        shortest = min(running.remaining for running in self._running.values())
        return self._now + max(0.0, shortest) * len(self._running)

    def complete(self, now: float) -> list[tuple[Sequence, ...]]:
        """End the steps that are due. Returns, for each of these steps, the sequences that progressed."""
        self._advance(now)
        shortest = min(running.remaining for running in self._running.values())
        done = [engine for engine, running in self._running.items() if running.remaining <= shortest]
        self.version += 1
        return [engine.scheduler.complete(self._running.pop(engine).step, now) for engine in done]

    def _advance(self, now: float) -> None:
        if self._running:
            share = (now - self._now) / len(self._running)
            for running in self._running.values():
                running.remaining -= share
        self._now = now
