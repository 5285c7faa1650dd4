"""The command line of a pool, derived from the spec."""

import pytest

from dps_engines.pools import POOLS
from dps_operator.build.launch import engine_arguments
from dps_operator.errors import SpecError
from dps_testkit.operator.routers import SMALLEST, router

ADAPTERS = [{"name": "sql", "path": "org/sql"}]


def test_engines_of_both_pools_load_the_adapters() -> None:
    pools = {"speculative": {"speculation": {"algorithm": "Ngram"}}}
    made = router({"model": {**SMALLEST["model"], "adapters": ADAPTERS}, "pools": pools})
    for pool in POOLS:
        line = engine_arguments(made, pool)
        assert line[line.index("--lora-paths") + 1] == "sql=org/sql"


def test_arguments_are_checked_against_the_launch() -> None:
    made = router({**SMALLEST, "engine": {"args": ["--enable-lora"]}})
    with pytest.raises(
        SpecError, match=r"supports no LoRA adapters with Standalone; .*, or remove --enable-lora$"
    ):
        engine_arguments(made, "speculative")


def test_arguments_of_the_engine_precede_those_of_the_pool() -> None:
    pools = {**SMALLEST["pools"], "greedy": {"args": ["--log-level", "debug"]}}
    made = router({**SMALLEST, "engine": {"args": ["--log-level", "info"]}, "pools": pools})
    assert engine_arguments(made, "greedy")[-4:] == ["--log-level", "info", "--log-level", "debug"]


def test_speculative_arguments_are_refused_for_the_greedy_pool() -> None:
    # Any flag --speculative-* serves as the example, provided that no field of the API sets it.
    made = router({**SMALLEST, "engine": {"args": ["--speculative-attention-mode", "decode"]}})
    engine_arguments(made, "speculative")
    with pytest.raises(SpecError, match="and only for the speculative pool"):
        engine_arguments(made, "greedy")


def test_tokenizer_and_revision_are_passed_to_the_engine() -> None:
    model = {**SMALLEST["model"], "tokenizer": "org/tokenizer", "revision": "v2"}
    line = engine_arguments(router({**SMALLEST, "model": model}), "greedy")
    assert line[line.index("--tokenizer-path") :][:4] == [
        "--tokenizer-path",
        "org/tokenizer",
        "--revision",
        "v2",
    ]
