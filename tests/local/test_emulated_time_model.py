"""The time model of the emulated A100, compared with the paper's Table 1."""

import pytest

from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, TimeModel

GREEDY = TimeModel()
SPECULATIVE = TimeModel(speculation=SPECULATION_DEFAULTS["STANDALONE"])


def turn_seconds(
    model: TimeModel, new_prompt_tokens: int, answer_tokens: int, tokens_per_step: float
) -> float:
    """The duration of one turn alone on an engine. Prefill yields the first token."""
    steps = (answer_tokens - 1) / tokens_per_step
    return model.prefill_seconds(new_prompt_tokens) + steps * model.decode_seconds(1)


@pytest.mark.parametrize(
    ("model", "tokens_per_step", "paper"), [(GREEDY, 1.0, 107.2), (SPECULATIVE, 2.5, 136.2)]
)
def test_single_stream_speed_matches_the_papers_table_1(
    model: TimeModel, tokens_per_step: float, paper: float
) -> None:
    assert 21 / turn_seconds(model, 200, 21, tokens_per_step) == pytest.approx(paper, rel=0.05)


@pytest.mark.parametrize(
    ("model", "uncached", "seconds"),
    [
        (TimeModel(1000, 0.01, 0.001), 0, 0.01),
        (TimeModel(1000, 0.01, 0.001), 500, 0.51),
        (TimeModel(1000, 0.01, 0.001, SPECULATION_DEFAULTS["NGRAM"]), 500, 0.51),
    ],
)
def test_prefill_time_is_that_of_the_weights_plus_that_of_the_uncached_tokens(
    model: TimeModel, uncached: int, seconds: float
) -> None:
    assert model.prefill_seconds(uncached) == pytest.approx(seconds)


@pytest.mark.parametrize(("batch", "seconds"), [(1, 0.011), (8, 0.018)])
def test_decode_step_grows_slowly_with_the_batch(batch: int, seconds: float) -> None:
    assert TimeModel(1000, 0.01, 0.001).decode_seconds(batch) == pytest.approx(seconds)


def test_speculative_step_costs_more_and_the_draft_model_prefills_too() -> None:
    assert SPECULATIVE.decode_seconds(1) > GREEDY.decode_seconds(1)
    assert SPECULATIVE.prefill_seconds(200) > GREEDY.prefill_seconds(200)


@pytest.mark.parametrize("algorithm", SPECULATION_DEFAULTS)
def test_default_acceptance_length_is_possible(algorithm: str) -> None:
    defaults = SPECULATION_DEFAULTS[algorithm]
    assert 1 <= defaults.acceptance_length <= defaults.draft_tokens
