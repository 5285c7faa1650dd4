"""The command line: SGLang's flags in SGLang's names, and the emulation's own."""

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, Speculation, TimeModel

MAX_RUNNING_SPECULATIVE = 48
"""SGLang's own default of --max-running-requests when it speculates."""


def parse(argv: list[str]) -> EngineSettings:
    """Settings from flags; a flag that SGLang does not have ends the process with status 2, as argparse does.

    Flags of SGLang (0.5.8 and 0.5.23) that mean nothing without a GPU are taken and shown in /server_info.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return _settings(given)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dps engine",
        description="An emulated SGLang server: its endpoints, tokenizer and prefix cache; no model, no GPU.",
        epilog="SGLang's other flags are accepted and have no effect. POST /emulate injects faults.",
        allow_abbrev=False,
    )
    real = parser.add_argument_group("SGLang's flags")
    real.add_argument("--host", default="127.0.0.1")
    real.add_argument("--port", type=int, default=30000)
    real.add_argument("--model-path", "--model", default=EngineSettings.model_path, help="a label only")
    real.add_argument("--served-model-name", help="default: the model path")
    real.add_argument("--tokenizer-path", metavar="DIR", help="default: the model path, if a directory")
    real.add_argument("--api-key")
    real.add_argument("--context-length", type=int, default=EngineSettings.context_length, metavar="TOKENS")
    real.add_argument("--max-running-requests", type=int)
    real.add_argument(
        "--max-total-tokens", type=int, default=EngineSettings.max_total_tokens, help="cache capacity"
    )
    real.add_argument("--enable-cache-report", action="store_true", help="cached_tokens in usage")
    real.add_argument("--random-seed", "--seed", type=int, default=0)
    real.add_argument("--speculative-algorithm", choices=sorted(SPECULATION_DEFAULTS))
    real.add_argument("--speculative-num-steps", type=int)
    real.add_argument("--speculative-num-draft-tokens", type=int)
    real.add_argument("--speculative-eagle-topk", type=int)
    own = parser.add_argument_group(
        "emulation only", "times in emulated seconds; defaults: A100 80 GB, Qwen2.5-7B"
    )
    own.add_argument("--emulate-prefill-tokens-per-second", type=_positive, metavar="RATE")
    own.add_argument(
        "--emulate-decode-step-seconds",
        type=_positive,
        nargs=2,
        metavar=("BASE", "PER_REQUEST"),
        help="a decode step takes BASE and PER_REQUEST for each running request",
    )
    own.add_argument("--emulate-draft-step-seconds", type=_positive, metavar="SECONDS")
    own.add_argument("--emulate-acceptance-length", type=_positive, metavar="TOKENS")
    own.add_argument(
        "--emulate-serialized-speculation",
        action="store_true",
        help="a speculative engine runs one request at a time, as in the paper's Table 2",
    )
    own.add_argument("--emulate-answer-tokens", type=_positive, default=96.0, metavar="MEAN")
    own.add_argument("--emulate-speed", type=_positive, default=1.0, metavar="FACTOR", help="run time faster")
    _accept_the_rest(parser)
    return parser


def _accept_the_rest(parser: argparse.ArgumentParser) -> None:
    """SGLang's other flags, by how many values each takes (argparse's nargs; "1" is one value, no list)."""
    by_arity = json.loads((files("dps_local.emulated_sglang") / "sglang_flags.json").read_text())
    for name in by_arity.pop("0"):
        parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name in by_arity.pop("1"):
        parser.add_argument(name, type=_plain, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for arity, names in by_arity.items():
        for name in names:
            parser.add_argument(
                name, nargs=arity, type=_plain, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


def _plain(text: str) -> int | float | str:
    """A number if it reads as one: /server_info tells values in JSON's types."""
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _settings(given: argparse.Namespace) -> EngineSettings:
    directory = given.tokenizer_path or given.model_path
    if not Path(directory).is_dir():
        raise ValueError("--tokenizer-path DIR is needed: a local directory with tokenizer.json")
    speculation = _speculation(given)
    arguments = {
        name: value
        for name, value in vars(given).items()
        if name != "api_key" and not name.startswith("emulate_") and value is not None
    }
    return EngineSettings(
        tokenizer_path=directory,
        host=given.host,
        port=given.port,
        model_path=given.model_path,
        served_model_name=given.served_model_name or given.model_path,
        api_key=given.api_key,
        context_length=given.context_length,
        max_running_requests=given.max_running_requests
        or (MAX_RUNNING_SPECULATIVE if speculation else EngineSettings.max_running_requests),
        max_total_tokens=given.max_total_tokens,
        enable_cache_report=given.enable_cache_report,
        time_model=_time_model(given, speculation),
        serialized_speculation=given.emulate_serialized_speculation,
        speed=given.emulate_speed,
        seed=given.random_seed,
        mean_answer_tokens=given.emulate_answer_tokens,
        arguments=arguments,
    )


def _time_model(given: argparse.Namespace, speculation: Speculation | None) -> TimeModel:
    base, per_request = given.emulate_decode_step_seconds or (
        TimeModel.decode_base_seconds,
        TimeModel.decode_seconds_per_request,
    )
    rate = given.emulate_prefill_tokens_per_second or TimeModel.prefill_tokens_per_second
    return TimeModel(rate, base, per_request, speculation)


def _speculation(given: argparse.Namespace) -> Speculation | None:
    changes = {
        "steps": given.speculative_num_steps,
        "top_k": given.speculative_eagle_topk,
        "draft_tokens": given.speculative_num_draft_tokens,
        "draft_step_seconds": given.emulate_draft_step_seconds,
        "acceptance_length": given.emulate_acceptance_length,
    }
    chosen = {name: value for name, value in changes.items() if value is not None}
    if given.speculative_algorithm is None:
        if chosen:
            raise ValueError("speculation is set up, but --speculative-algorithm is not given")
        return None
    speculation = replace(SPECULATION_DEFAULTS[given.speculative_algorithm], **chosen)
    if not 1 <= speculation.acceptance_length <= speculation.draft_tokens:
        raise ValueError(
            f"an acceptance length of {speculation.acceptance_length} is not between 1 and the "
            f"{speculation.draft_tokens} draft tokens"
        )
    return speculation
