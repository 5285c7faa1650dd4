"""A simulated GPU budget: replicas move to the pool with the higher load, and every turn is served."""

from collections.abc import Sequence

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import AlwaysGreedy, TotalLength
from dps_lab.simulate.engine import VirtualEngine
from dps_lab.simulate.fleet import Budget, FleetSpec, build_engines
from dps_lab.simulate.gateway import VirtualGateway
from dps_lab.simulate.run import Load, Scenario, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace, TurnLengths

ENGINES = {Pool.SPECULATIVE: 2, Pool.GREEDY: 1}
BUDGET = Budget(cooldown_seconds=20.0, start_seconds=10.0)
LONG = TurnLengths(prompt_tokens=6_000, output_tokens=400)


def sessions(count: int, rate: float) -> list[SessionTrace]:
    return [
        SessionTrace(id=f"s{number}", arrival_seconds=number / rate, turns=[LONG]) for number in range(count)
    ]


def served(fleet: FleetSpec) -> list[TurnResult]:
    return simulate(sessions(300, 4.0), Scenario(fleet, AlwaysGreedy(), Load()))


def mean_seconds(results: Sequence[TurnResult]) -> float:
    return sum(result.seconds for result in results) / len(results)


def test_replica_moves_to_the_loaded_pool_and_every_turn_is_served() -> None:
    fixed, moving = served(FleetSpec(ENGINES)), served(FleetSpec(ENGINES, budget=BUDGET))
    assert {result.session for result in moving} == {result.session for result in fixed}
    assert mean_seconds(moving) < mean_seconds(fixed)


def test_pool_of_which_the_load_ratio_expects_little_load_has_more_replicas() -> None:
    lengths = (LONG, LONG.model_copy(update={"prompt_tokens": 12_000}))
    mixed = [
        session.model_copy(update={"turns": [lengths[n % 2]]}) for n, session in enumerate(sessions(300, 6.0))
    ]
    halves = dict.fromkeys(Pool, 2)
    found = {}
    for ratio in (0.1, 10.0):
        budget = Budget(cooldown_seconds=10.0, start_seconds=5.0, load_ratio=ratio)
        results = simulate(mixed, Scenario(FleetSpec(halves, budget=budget), TotalLength(9_000), Load()))
        found[ratio] = {pool: mean_seconds([each for each in results if each.pool is pool]) for pool in Pool}
    assert found[0.1][Pool.SPECULATIVE] < found[10.0][Pool.SPECULATIVE]
    assert found[0.1][Pool.GREEDY] > found[10.0][Pool.GREEDY]


def test_removed_engine_receives_no_further_turns() -> None:
    engines: list[VirtualEngine] = [
        engine
        for group in build_engines(FleetSpec({Pool.SPECULATIVE: 0, Pool.GREEDY: 2}))
        for engine in group
    ]
    gateway = VirtualGateway(AlwaysGreedy(), engines, replicas=2, seed=0)
    gateway.remove(engines[0])
    gateway.poll()
    assert gateway.engines == engines[1:]
    gateway.add(engines[0])
    assert set(gateway.engines) == set(engines)
