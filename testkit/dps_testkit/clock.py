"""A clock that tests advance."""


class ManualClock:
    """Call it for the time in seconds. Tests change `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
