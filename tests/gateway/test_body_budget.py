"""The memory for bodies is divided between the tenants that need it."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.auth import BodyBudget
from dps_gateway.config import Limits

LIMIT, ONE_BODY = 100, 10
MANY = 1000
LIMITS = Limits.model_validate({"maxBufferedBytes": LIMIT, "maxBodyBytes": ONE_BODY})


def reserved(bodies: BodyBudget, tenant: str, *, shared: bool = True) -> int:
    """The number of bytes that a tenant can reserve one by one."""
    return next(count for count in range(MANY) if not bodies.reserve(tenant, 1, LIMITS, shared=shared))


def test_tenant_holds_at_most_as_much_as_it_leaves_free() -> None:
    bodies = BodyBudget()
    assert reserved(bodies, "a") == LIMIT // 2
    assert reserved(bodies, "b") == LIMIT // 4
    bodies.release("a", LIMIT // 2)
    assert reserved(bodies, "b") == LIMIT // 4


def test_any_tenant_may_hold_one_body_while_there_is_room() -> None:
    bodies = BodyBudget()
    assert [reserved(bodies, tenant) for tenant in "abcd"] == [50, 25, 12, ONE_BODY]
    assert [reserved(bodies, tenant) for tenant in "efg"] == [3, 0, 0]


def test_only_tenant_may_use_all_memory() -> None:
    assert reserved(BodyBudget(), "", shared=False) == LIMIT


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=40))
def test_no_tenant_exceeds_half_and_released_memory_is_free_again(steps: Sequence[tuple[str, int]]) -> None:
    bodies, held = BodyBudget(), dict.fromkeys("abc", 0)
    for tenant, size in steps:
        if bodies.reserve(tenant, size, LIMITS, shared=True):
            held[tenant] += size
        assert held[tenant] <= LIMIT // 2
        assert bodies.used == sum(held.values()) <= LIMIT
    for tenant, size in held.items():
        bodies.release(tenant, size)
    assert bodies.used == 0
    assert reserved(bodies, "d") == LIMIT // 2
