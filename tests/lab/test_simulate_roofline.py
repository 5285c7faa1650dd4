"""The time model: bandwidth, compute and capacity of each GPU and model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.roofline import ALGORITHMS, FITTED, EngineTiming, kv_capacity, speculation

A100 = HARDWARE["a100-7b"]
GREEDY = EngineTiming(A100, None)
SPECULATIVE = EngineTiming(A100, speculation("STANDALONE"))

batches = st.integers(1, 64)
contexts = st.integers(0, 300_000)
lengths = st.integers(1, 20_000)


def test_decoding_one_token_takes_at_least_one_read_of_the_weights() -> None:
    assert GREEDY.decode_seconds(1, 0) >= 2 * A100.target.active_parameters / A100.gpu.bytes_per_second


def test_no_pass_is_faster_than_peak_compute() -> None:
    operations = 2 * A100.target.active_parameters * 8000
    assert GREEDY.prefill_seconds(8000) > operations / A100.gpu.flops


@given(batches, contexts, st.integers(0, 1000))
def test_a_larger_batch_and_a_longer_context_never_take_less_time(
    batch: int, context: int, more: int
) -> None:
    for timing in (GREEDY, SPECULATIVE):
        assert timing.decode_seconds(batch + 1, context + more) >= timing.decode_seconds(batch, context)


@given(lengths, st.integers(0, 1000))
def test_a_longer_prefill_never_takes_less_time(tokens: int, more: int) -> None:
    for timing in (GREEDY, SPECULATIVE):
        assert timing.prefill_seconds(tokens + more) >= timing.prefill_seconds(tokens)


@given(lengths)
def test_a_draft_model_prefills_too(tokens: int) -> None:
    assert SPECULATIVE.prefill_seconds(tokens) > GREEDY.prefill_seconds(tokens)
    assert SPECULATIVE.prefill_seconds(tokens, 0, 5000) > SPECULATIVE.prefill_seconds(tokens)


def test_speculation_is_faster_alone_and_slower_in_a_large_batch() -> None:
    acceptance = speculation("STANDALONE").acceptance_length
    assert SPECULATIVE.decode_seconds(1, 4000) / acceptance < GREEDY.decode_seconds(1, 4000)
    assert SPECULATIVE.decode_seconds(256, 256_000) / acceptance > GREEDY.decode_seconds(256, 256_000)


def test_a_gpu_with_more_bandwidth_decodes_faster() -> None:
    a100, h100, h200 = (EngineTiming(HARDWARE[f"{gpu}-7b"], None) for gpu in ("a100", "h100", "h200"))
    assert a100.decode_seconds(1, 0) > h100.decode_seconds(1, 0) > h200.decode_seconds(1, 0)


def test_draft_weights_and_draft_kv_reduce_the_cache() -> None:
    [greedy], [speculative] = kv_capacity([GREEDY]), kv_capacity([SPECULATIVE])
    assert 900_000 < greedy < 1_000_000
    assert speculative < 0.7 * greedy


def test_engines_on_one_gpu_divide_its_memory() -> None:
    greedy, speculative = kv_capacity([GREEDY, SPECULATIVE])
    assert greedy < kv_capacity([GREEDY])[0] / 2
    assert speculative < kv_capacity([SPECULATIVE])[0] / 2


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="use fewer engines per GPU"):
        kv_capacity([GREEDY] * 5)


@pytest.mark.parametrize("name", HARDWARE)
def test_every_listed_combination_holds_its_weights_and_a_long_prompt(name: str) -> None:
    timing = EngineTiming(HARDWARE[name], speculation("STANDALONE"))
    assert kv_capacity([timing])[0] > 32_768


def test_an_acceptance_length_beyond_the_draft_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="choose 1 to 4, its number of draft tokens"):
        speculation("STANDALONE", 4.5)


@pytest.mark.parametrize(
    ("acceptance_length", "verified"),
    [pytest.param(1.0, 1.0, id="nothing"), pytest.param(1.57, 2.0, id="one token"), (25.0, 25.0)],
)
def test_suffix_decoding_drafts_in_proportion_to_what_is_accepted(
    acceptance_length: float, verified: float
) -> None:
    assert speculation("SUFFIX", acceptance_length).verified_tokens == pytest.approx(verified)


def test_suffix_decoding_has_no_draft_model_and_verifies_less_than_ngram_in_large_batches() -> None:
    suffix, ngram = (EngineTiming(A100, speculation(name, 1.6)) for name in ("SUFFIX", "NGRAM"))
    assert kv_capacity([suffix]) == kv_capacity([GREEDY])
    assert suffix.prefill_seconds(4000) == GREEDY.prefill_seconds(4000)
    assert suffix.decode_seconds(64, 64_000) < ngram.decode_seconds(64, 64_000)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_verifies_at_least_what_it_accepts(algorithm: str) -> None:
    chosen = speculation(algorithm)
    assert 1 <= chosen.acceptance_length <= chosen.verified_tokens <= chosen.draft_tokens


def test_the_fitted_efficiencies_are_possible() -> None:
    assert 0 < FITTED.bandwidth <= 1
    assert 0 < FITTED.compute <= 1
