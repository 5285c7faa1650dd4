"""The time model: bandwidth, compute and capacity of each GPU and model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.roofline import EngineTiming, kv_capacity, speculation

A100 = HARDWARE["a100-7b"]
GREEDY = EngineTiming(A100, None)
SPECULATIVE = EngineTiming(A100, speculation("STANDALONE"))

batches = st.integers(1, 64)
contexts = st.integers(0, 300_000)
lengths = st.integers(1, 20_000)


def test_decoding_one_token_takes_at_least_one_read_of_the_weights() -> None:
    assert GREEDY.decode_seconds(1, 0) >= 2 * A100.target.active_parameters / A100.gpu.bytes_per_second


@given(batches, contexts, lengths, st.integers(0, 1000))
def test_more_work_never_takes_less_time(batch: int, context: int, tokens: int, more: int) -> None:
    for timing in (GREEDY, SPECULATIVE):
        assert timing.decode_seconds(batch + 1, context + more) >= timing.decode_seconds(batch, context)
        assert timing.prefill_seconds(tokens + more) >= timing.prefill_seconds(tokens)
    assert SPECULATIVE.prefill_seconds(tokens) > GREEDY.prefill_seconds(tokens)
    assert SPECULATIVE.prefill_seconds(tokens, 0, 5000) > SPECULATIVE.prefill_seconds(tokens)


def test_speculation_is_faster_alone_and_slower_in_a_large_batch() -> None:
    acceptance = speculation("STANDALONE").acceptance_length
    assert SPECULATIVE.decode_seconds(1, 4000) / acceptance < GREEDY.decode_seconds(1, 4000)
    assert SPECULATIVE.decode_seconds(256, 256_000) / acceptance > GREEDY.decode_seconds(256, 256_000)


def test_draft_weights_and_a_shared_gpu_reduce_the_cache() -> None:
    [greedy], [speculative] = kv_capacity([GREEDY]), kv_capacity([SPECULATIVE])
    assert 900_000 < greedy < 1_000_000
    assert speculative < 0.7 * greedy
    shared = kv_capacity([GREEDY, SPECULATIVE])
    assert shared[0] < greedy / 2
    assert shared[1] < speculative / 2


@pytest.mark.parametrize("name", HARDWARE)
def test_every_listed_combination_holds_its_weights_and_a_long_prompt(name: str) -> None:
    timing = EngineTiming(HARDWARE[name], speculation("STANDALONE"))
    assert kv_capacity([timing])[0] > 32_768


def test_suffix_decoding_has_no_draft_model_and_verifies_less_than_ngram_in_large_batches() -> None:
    suffix, ngram = (EngineTiming(A100, speculation(name, 1.6)) for name in ("SUFFIX", "NGRAM"))
    assert kv_capacity([suffix]) == kv_capacity([GREEDY])
    assert suffix.prefill_seconds(4000) == GREEDY.prefill_seconds(4000)
    assert suffix.decode_seconds(64, 64_000) < ngram.decode_seconds(64, 64_000)
