"""The order in which a fair queue serves its entries."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.upstream.fair_queue import FairQueue, Queued

ENTRIES = st.lists(
    st.builds(Queued, tenant=st.sampled_from("ABC"), session=st.sampled_from(["1", "2", None]))
)


def queue_of(entries: list[Queued]) -> FairQueue[Queued]:
    queue: FairQueue[Queued] = FairQueue()
    for entry in entries:
        queue.add(entry)
    return queue


@given(ENTRIES)
def test_every_entry_is_served_once_and_in_the_order_of_iteration(entries: list[Queued]) -> None:
    queue = queue_of(entries)
    order, served = list(queue), []
    while len(queue):
        entry = next(iter(queue))
        queue.remove(entry, served=True)
        served.append(entry)
    assert served == order
    assert Counter(served) == Counter(entries)


@given(ENTRIES)
def test_requests_of_one_session_are_served_in_order_of_arrival(entries: list[Queued]) -> None:
    order = list(queue_of(entries))
    for key in {(entry.tenant, entry.session) for entry in entries if entry.session is not None}:
        arrived = [entry for entry in entries if (entry.tenant, entry.session) == key]
        assert [entry for entry in order if (entry.tenant, entry.session) == key] == arrived


@given(ENTRIES)
def test_no_tenant_is_served_twice_while_another_one_waits(entries: list[Queued]) -> None:
    order = [entry.tenant for entry in queue_of(entries)]
    for place, (first, second) in enumerate(pairwise(order), start=2):
        assert first != second or set(order[place:]) <= {first}


@given(ENTRIES, st.lists(st.integers(0, 50)))
def test_removed_entries_are_gone_and_the_others_keep_their_order_within_a_tenant(
    entries: list[Queued], indices: list[int]
) -> None:
    queue = queue_of(entries)
    removed = {entries[index] for index in indices if index < len(entries)}
    assert all(queue.remove(entry) for entry in removed)
    assert not any(queue.remove(entry) for entry in removed)
    assert (len(queue), set(queue)) == (len(entries) - len(removed), set(entries) - removed)


@given(ENTRIES, st.sampled_from("ABCD"))
def test_new_entry_displaces_one_only_if_its_tenant_stays_at_or_below_the_longest(
    entries: list[Queued], tenant: str
) -> None:
    sizes = Counter(entry.tenant for entry in entries)
    displaced = queue_of(entries).displaced_by(tenant)
    longest = max(sizes.values(), default=0)
    assert (displaced is not None) == (longest > sizes[tenant] + 1)
    assert displaced is None or sizes[displaced.tenant] == longest


@given(
    st.lists(
        st.builds(
            Queued,
            tenant=st.sampled_from("ABC"),
            session=st.sampled_from(["1", None]),
            urgency=st.integers(0, 7),
        )
    ),
    st.sampled_from("ABCD"),
    st.integers(0, 7),
)
def test_queue_is_in_order_of_urgency_and_displaces_only_the_lowest(
    entries: list[Queued], tenant: str, urgency: int
) -> None:
    queue = queue_of(entries)
    order = [entry.urgency for entry in queue]
    assert order == sorted(entry.urgency for entry in entries)
    displaced = queue.displaced_by(tenant, urgency)
    assert displaced is None or urgency <= displaced.urgency == order[-1]
    assert displaced is not None or not order or urgency >= order[-1]
    while len(queue):
        assert queue.remove(next(iter(queue)), served=True)
