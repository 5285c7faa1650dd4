"""Ejection of replicas that return errors although their health checks succeed."""

from dps_gateway.upstream.replica import (
    ERRORS_TO_EJECT,
    FIRST_EJECTION_SECONDS,
    LONGEST_EJECTION_SECONDS,
    Replica,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ejected(clock: Clock) -> Replica:
    replica = Replica("a", clock)
    for _ in range(ERRORS_TO_EJECT):
        assert not replica.failing
        replica.errored()
    assert replica.failing
    assert replica.eject() == FIRST_EJECTION_SECONDS
    return replica


def test_success_between_errors_prevents_ejection() -> None:
    replica = Replica("a", Clock())
    for _ in range(3):
        for _ in range(ERRORS_TO_EJECT - 1):
            replica.errored()
        replica.succeeded()
    assert not replica.failing


def test_ejected_replica_receives_one_probe_after_the_backoff() -> None:
    clock = Clock()
    replica = ejected(clock)
    assert not replica.accepts(10)
    clock.now += FIRST_EJECTION_SECONDS
    assert (replica.ready, replica.accepts(10)) == (True, True)
    replica.in_flight = 1
    assert not replica.accepts(10)
    replica.succeeded()
    assert replica.accepts(10)


def test_failed_probe_doubles_the_backoff_up_to_a_bound() -> None:
    clock = Clock()
    replica = ejected(clock)
    backoffs = []
    for _ in range(6):
        clock.now += LONGEST_EJECTION_SECONDS
        replica.errored()
        assert replica.failing
        backoffs.append(replica.eject())
    assert backoffs == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_late_answers_of_an_ejected_replica_do_not_end_or_extend_the_ejection() -> None:
    clock = Clock()
    replica = ejected(clock)
    replica.errored()
    replica.succeeded()
    assert (replica.ejected, replica.failing) == (True, False)
    clock.now += FIRST_EJECTION_SECONDS
    assert replica.probing
