"""The relation of a prompt to its session's history, and its ΔL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import FETCH_THRESHOLD_TOKENS, CachedPrompt, CacheUnits, PromptTokens
from dps_gateway.session.growth import Growth, History, compare
from dps_gateway.session.record import CachedOn, Point
from tests.gateway.session_records import GREEDY, SPECULATIVE, point, record

OTHER = CachedOn(Pool.GREEDY, "othr")


points = st.builds(
    Point,
    turn=st.integers(1, 12),
    digest=st.sampled_from("abcdefgh"),
    offset=st.integers(1, 4000),
    tokens=st.integers(0, 1000),
    counted=st.integers(1, 1000),
    holders=st.lists(st.sampled_from([SPECULATIVE, GREEDY, OTHER]), min_size=1, unique=True).map(tuple),
    correction=st.integers(-50, 2000),
    conversation=st.sampled_from(["", "a"]),
    shared=st.booleans(),
)


def tokens(growth: Growth, length: int, holder: CachedOn, common: bool = True) -> PromptTokens:
    return growth.cached(length, common_prefix_cache=common).tokens(holder.replica)


def test_longest_prefix_wins_even_if_a_shorter_one_is_newer() -> None:
    compacted = record(point(1), point(2, length=900), point(3, length=150))
    growth = compare(compacted, lambda p: p.turn == 2)
    assert (growth.history, growth.delta_tokens(1000)) == (History.BRANCHED, 100)


@given(counted=st.integers(0, 5000), added=st.integers(0, 5000), correction=st.integers(-200, 5000))
def test_constant_correction_of_prompt_lengths_does_not_change_delta(
    counted: int, added: int, correction: int
) -> None:
    counted += 200
    base = point(1, length=counted)._replace(correction=correction)
    growth = compare(record(base), lambda _: True)
    assert growth.delta_tokens(counted + added + base.correction) == added


@pytest.mark.parametrize(
    ("shared", "held", "common", "expected"),
    [
        pytest.param(0, 0, True, PromptTokens(0, 0, 1000), id="a new prompt is prefilled"),
        pytest.param(0, 900, True, PromptTokens(900, 0, 100), id="a held prefix"),
        pytest.param(900, 0, True, PromptTokens(0, 900, 100), id="a prefix that only the other pool holds"),
        pytest.param(900, 0, False, PromptTokens(0, 0, 1000), id="without a common prefix cache"),
        pytest.param(900, 400, True, PromptTokens(400, 500, 100), id="a part is held"),
        pytest.param(655, 400, True, PromptTokens(400, 0, 600), id="less than SGLang fetches"),
        pytest.param(656, 400, True, PromptTokens(400, 256, 344), id="as much as SGLang fetches"),
        pytest.param(1200, 0, True, PromptTokens(0, 1000, 0), id="a repeated prompt that was shorter"),
    ],
)
def test_each_token_of_a_prompt_is_held_fetched_or_prefilled(
    shared: int, held: int, common: bool, expected: PromptTokens
) -> None:
    known = [point(1, held, SPECULATIVE)] if held else []
    if shared:
        known.append(point(2, shared, GREEDY)._replace(shared=True))
    growth = compare(record(*known), lambda _: True)
    assert tokens(growth, 1000, SPECULATIVE, common) == expected


@pytest.mark.parametrize(
    ("shared", "held", "units", "expected"),
    [
        pytest.param(700, 0, CacheUnits(64), PromptTokens(0, 640, 360, page_rest=60), id="a shared prefix"),
        pytest.param(
            700, 400, CacheUnits(64), PromptTokens(384, 256, 360, page_rest=60), id="a part is held"
        ),
        pytest.param(
            660, 450, CacheUnits(64), PromptTokens(448, 0, 552, page_rest=2), id="too few pages to fetch"
        ),
        pytest.param(700, 400, CacheUnits(64, 320), PromptTokens(384, 0, 616, page_rest=16), id="threshold"),
        pytest.param(0, 63, CacheUnits(64), PromptTokens(0, 0, 1000, page_rest=63), id="less than a page"),
    ],
)
def test_only_whole_pages_are_held_and_fetched(
    shared: int, held: int, units: CacheUnits, expected: PromptTokens
) -> None:
    assert CachedPrompt(1000, {"spec": held}, shared).tokens("spec", units) == expected


@given(
    st.lists(points, max_size=12),
    st.sets(st.sampled_from("abcdefgh")),
    st.integers(0, 3000),
    st.sampled_from([SPECULATIVE, GREEDY, OTHER]),
    st.booleans(),
)
def test_delta_is_at_most_the_prompt_and_its_tokens_add_up_to_its_length(
    history: list[Point], prefixes: set[str], length: int, holder: CachedOn, common: bool
) -> None:
    growth = compare(record(*history), lambda p: p.digest in prefixes)
    assert 0 <= growth.delta_tokens(length) <= length
    found = tokens(growth, length, holder, common)
    assert found.held + found.fetchable + found.prefill == length
    assert min(found.held, found.prefill) >= 0
    assert found.fetchable == 0 or (common and found.fetchable >= FETCH_THRESHOLD_TOKENS)
