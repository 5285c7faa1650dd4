"""The command line of `dps engine`: SGLang's flags, and those of the emulation."""

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from dps_local.emulated_sglang.settings import MAX_RUNNING_SPECULATIVE, EngineSettings
from dps_local.emulated_sglang.storage import TOKENS_PER_SECOND
from dps_local.emulated_sglang.storage_flags import page_tokens, storage_options
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, Speculation, TimeModel


def parse(argv: list[str]) -> EngineSettings:
    """Parse the command line. Exits with status 2 if a flag is unknown to SGLang or a value is invalid.

    Flags of SGLang 0.5.8 and 0.5.23 that have no effect in the emulation are accepted and shown in /server_info.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return _settings(options)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dps engine",
        description="Run an emulated SGLang server. It has SGLang's endpoints, tokenization and prefix cache, but "
        "no model: answers are random words, timed like those of a GPU.",
        epilog="SGLang's other flags are accepted and ignored. POST /emulate injects faults.",
        allow_abbrev=False,
    )
    real = parser.add_argument_group("SGLang's flags")
    real.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    real.add_argument("--port", type=int, default=30000, help="port to listen on (default: 30000)")
    real.add_argument(
        "--model-path",
        "--model",
        default=EngineSettings.model_path,
        help="the model's name; no model is loaded",
    )
    real.add_argument("--served-model-name", help="name of the model in the API (default: the model path)")
    real.add_argument(
        "--tokenizer-path",
        metavar="DIR",
        help="folder of the tokenizer (default: the model path, if it is a directory)",
    )
    real.add_argument("--api-key", help="key that requests must contain")
    real.add_argument(
        "--context-length",
        type=int,
        default=EngineSettings.context_length,
        metavar="TOKENS",
        help="maximum length of a prompt and its answer (default: %(default)s)",
    )
    real.add_argument(
        "--max-running-requests", type=int, help="maximum number of requests that run at the same time"
    )
    real.add_argument(
        "--max-queued-requests", type=int, help="maximum number of requests that wait (default: no limit)"
    )
    real.add_argument(
        "--max-total-tokens",
        type=int,
        default=EngineSettings.max_total_tokens,
        help="capacity of the KV cache (default: %(default)s)",
    )
    real.add_argument("--enable-cache-report", action="store_true", help="report cached_tokens in usage")
    real.add_argument("--enable-response-store", action="store_true", help="store answers of /v1/responses")
    real.add_argument("--random-seed", "--seed", type=int, default=0, help="seed of the answers (default: 0)")
    real.add_argument(
        "--speculative-algorithm",
        choices=sorted(SPECULATION_DEFAULTS),
        help="speculate with this algorithm (default: greedy decoding)",
    )
    real.add_argument("--speculative-num-steps", type=int, help="draft steps per verification step")
    real.add_argument(
        "--speculative-num-draft-tokens", type=int, help="tokens verified per verification step"
    )
    real.add_argument("--speculative-eagle-topk", type=int, help="branches per draft step")
    own = parser.add_argument_group(
        "emulation", "Durations are in emulated seconds. The defaults model Qwen2.5-7B on an A100 80 GB."
    )
    own.add_argument(
        "--emulate-decode-step-seconds",
        type=_positive,
        nargs=2,
        metavar=("BASE", "PER_REQUEST"),
        help="duration of a decode step: BASE, plus PER_REQUEST for each running request",
    )
    own.add_argument(
        "--emulate-acceptance-length",
        type=_positive,
        metavar="TOKENS",
        help="mean tokens that one verification yields",
    )
    own.add_argument(
        "--emulate-serialized-speculation",
        action="store_true",
        help="process one request at a time if speculation is on, as in the paper's Table 2",
    )
    own.add_argument(
        "--emulate-speed",
        type=_positive,
        default=1.0,
        metavar="FACTOR",
        help="emulated seconds per real second (default: 1)",
    )
    own.add_argument(
        "--emulate-storage-directory",
        type=Path,
        metavar="DIR",
        help="directory that stands for Mooncake, the storage of a shared prefix cache (default: none is shared)",
    )
    own.add_argument(
        "--emulate-storage-tokens-per-second",
        type=_positive,
        default=TOKENS_PER_SECOND,
        metavar="RATE",
        help="transfer rate of the shared prefix cache (default: %(default)s)",
    )
    _accept_other_flags(parser)
    return parser


def _accept_other_flags(parser: argparse.ArgumentParser) -> None:
    """Add SGLang's other flags. The JSON file groups them by argparse's nargs; "1" means a single value, not a list."""
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
    """A number if `text` is one: /server_info reports values as JSON types."""
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _settings(options: argparse.Namespace) -> EngineSettings:
    directory = options.tokenizer_path or options.model_path
    if not Path(directory).is_dir():
        raise ValueError("--tokenizer-path is required: a local directory with tokenizer.json")
    speculation = _speculation(options)
    arguments = {
        name: value
        for name, value in vars(options).items()
        if name != "api_key" and not name.startswith("emulate_") and value is not None
    }
    return EngineSettings(
        tokenizer_path=directory,
        host=options.host,
        port=options.port,
        model_path=options.model_path,
        served_model_name=options.served_model_name or options.model_path,
        api_key=options.api_key,
        context_length=options.context_length,
        max_running_requests=options.max_running_requests
        or (MAX_RUNNING_SPECULATIVE if speculation else EngineSettings.max_running_requests),
        max_queued_requests=options.max_queued_requests,
        max_total_tokens=options.max_total_tokens,
        enable_cache_report=options.enable_cache_report,
        enable_response_store=options.enable_response_store,
        time_model=_time_model(options, speculation),
        serialized_speculation=options.emulate_serialized_speculation,
        speed=options.emulate_speed,
        seed=options.random_seed,
        page_tokens=page_tokens(options),
        storage=storage_options(options),
        arguments=arguments,
    )


def _time_model(options: argparse.Namespace, speculation: Speculation | None) -> TimeModel:
    if options.emulate_decode_step_seconds is None:
        return TimeModel(speculation=speculation)
    base, per_request = options.emulate_decode_step_seconds
    return TimeModel(
        decode_base_seconds=base, decode_seconds_per_request=per_request, speculation=speculation
    )


def _speculation(options: argparse.Namespace) -> Speculation | None:
    changes = {
        "steps": options.speculative_num_steps,
        "top_k": options.speculative_eagle_topk,
        "draft_tokens": options.speculative_num_draft_tokens,
        "acceptance_length": options.emulate_acceptance_length,
    }
    chosen = {name: value for name, value in changes.items() if value is not None}
    if options.speculative_algorithm is None:
        if chosen:
            raise ValueError("options for speculation require --speculative-algorithm")
        return None
    speculation = replace(SPECULATION_DEFAULTS[options.speculative_algorithm], **chosen)
    if not 1 <= speculation.acceptance_length <= speculation.draft_tokens:
        raise ValueError(
            f"--emulate-acceptance-length {speculation.acceptance_length} must be between 1 and the number of "
            f"draft tokens, {speculation.draft_tokens}"
        )
    return speculation
