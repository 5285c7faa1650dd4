"""Ejection of replicas that return errors although their health checks succeed."""

from dps_gateway.upstream.replica import (
    ERRORS_TO_EJECT,
    FIRST_EJECTION_SECONDS,
    LONGEST_EJECTION_SECONDS,
    RATE_WINDOW,
    SMALLEST_WEIGHT,
    Replica,
)
from dps_testkit.clock import ManualClock
from tests.gateway.engine_pool import SinglePool

SLOW_START_SECONDS = 40.0


def ejected(clock: ManualClock) -> Replica:
    replica = Replica("a", clock, SLOW_START_SECONDS)
    for _ in range(ERRORS_TO_EJECT):
        assert not replica.failing
        replica.errored()
    assert replica.failing
    assert replica.eject() == FIRST_EJECTION_SECONDS
    return replica


def test_success_between_errors_prevents_ejection() -> None:
    replica = Replica("a", ManualClock())
    for _ in range(3):
        for _ in range(ERRORS_TO_EJECT - 1):
            replica.errored()
        replica.succeeded()
    assert not replica.failing


def test_ejected_replica_receives_one_probe_after_the_backoff() -> None:
    clock = ManualClock()
    pool = SinglePool("a", slots=10)
    replica = pool.replicas["a"] = ejected(clock)
    assert not pool.has_room()
    clock.now += FIRST_EJECTION_SECONDS
    assert (replica.ready, pool.has_room()) == (True, True)
    replica.in_flight = 1
    assert not pool.has_room()
    replica.succeeded()
    assert pool.has_room()


def test_failed_probe_doubles_the_backoff_up_to_a_bound() -> None:
    clock = ManualClock()
    replica = ejected(clock)
    backoffs = []
    for _ in range(6):
        clock.now += LONGEST_EJECTION_SECONDS
        replica.errored()
        assert replica.failing
        backoffs.append(replica.eject())
    assert backoffs == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_late_answers_of_an_ejected_replica_do_not_end_or_extend_the_ejection() -> None:
    clock = ManualClock()
    replica = ejected(clock)
    replica.errored()
    replica.succeeded()
    assert (replica.ejected, replica.failing) == (True, False)
    clock.now += FIRST_EJECTION_SECONDS
    assert replica.probing


def recovered(clock: ManualClock) -> Replica:
    replica = ejected(clock)
    clock.now += FIRST_EJECTION_SECONDS
    replica.succeeded()
    return replica


def test_weight_grows_after_an_ejection() -> None:
    clock = ManualClock()
    replica = recovered(clock)
    weights = []
    for _ in range(5):
        weights.append(replica.weight)
        clock.now += SLOW_START_SECONDS / 4
    assert weights == [SMALLEST_WEIGHT, 0.25, 0.5, 0.75, 1.0]


def test_replica_is_ejected_if_half_of_its_recent_answers_are_errors() -> None:
    replica = Replica("a", ManualClock())
    failing = []
    for _ in range(RATE_WINDOW // 2):
        replica.succeeded()
        replica.errored()
        failing.append(replica.failing)
    assert failing == [False] * (RATE_WINDOW // 2 - 1) + [True]


def test_hung_replica_is_ready_again_once_it_generates() -> None:
    clock = ManualClock()
    replica = Replica("a", clock)
    clock.now += 30
    replica.hung = True
    assert (replica.ready, replica.silent_seconds) == (False, 30)
    replica.note_token()
    assert (replica.ready, replica.silent_seconds) == (True, 0)
