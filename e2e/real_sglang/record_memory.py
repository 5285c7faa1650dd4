"""Record how two versions of SGLang divide GPU memory, without a GPU and without importing SGLang.

record_memory.py OLDER NEWER: folders with the package `sglang` of 0.5.8.post1 and 0.5.23, for example unpacked wheels.
Prints the JSON of tests/engines/fixtures/sglang-memory.json.

SGLang's own functions are executed. What they use is replaced: the GPU, a dense model with one kind of attention, and
settings that have their defaults.
"""

import ast
import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GPUS_MIB = (40 * 1024, 80 * 1024)
TENSOR_PARALLEL = (1, 2, 4, 8)
ALGORITHMS = (None, "NGRAM", "STANDALONE", "EAGLE3")
LAYERS = ((28, 28), (28, 24), (80, 32), (32, 16), (64, 28))
"""Layers of a model and of its draft model."""
CELL_BYTES = 57_344
"""Bytes per token of the KV cache of the model alone."""


class Settings(SimpleNamespace):
    """Settings of a server; those that are not given are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _unused(*_: Any, **__: Any) -> None:
    """Replaces a function whose result is not needed, or is None or false by default."""


def executable(file: Path, name: str, known: dict[str, Any]) -> Callable[..., Any]:
    """A function of a source file, or a method as `Class.name`. known: the names that it does not define itself."""
    scope: Any = ast.parse(file.read_text())
    for part in name.split("."):
        (scope,) = [each for each in scope.body if getattr(each, "name", None) == part]
    for node in ast.walk(scope):
        for block in ("body", "orelse"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                setattr(node, block, [each for each in statements if not isinstance(each, ast.ImportFrom)])
    names = {node.id: _unused for node in ast.walk(scope) if isinstance(node, ast.Name)}
    for builtin in dir(__builtins__):
        names.pop(builtin, None)
    names |= known
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], scope], [])
    exec(compile(ast.fix_missing_locations(module), str(file), "exec"), names)
    made: Callable[..., Any] = names[name.rpartition(".")[2]]
    return made


def _dense(**settings: Any) -> Settings:
    model = SimpleNamespace(is_multimodal=False)
    return Settings(
        pp_size=1, device="cuda", disaggregation_mode="null", get_model_config=lambda: model, **settings
    )


def fraction_of_older(sglang: Path, gpu_mib: int, tensor_parallel: int, algorithm: str | None) -> float:
    """The default --mem-fraction-static of 0.5.8.post1."""
    settings = _dense(
        tp_size=tensor_parallel,
        speculative_algorithm=algorithm,
        use_mla_backend=lambda: False,
        _generate_cuda_graph_batch_sizes=list,
        _generate_piecewise_cuda_graph_tokens=list,
    )
    executable(sglang / "srt/server_args.py", "ServerArgs._handle_gpu_memory_settings", {})(settings, gpu_mib)
    found: float = settings.mem_fraction_static
    return found


def fraction_of_newer(sglang: Path, gpu_mib: int, tensor_parallel: int, algorithm: str | None) -> float:
    """The default --mem-fraction-static of 0.5.23, which sizes the KV cache after the capture of CUDA graphs."""
    phase = {"bs": [1], "max_bs": None}
    settings = _dense(
        tp_size=tensor_parallel,
        speculative_algorithm=algorithm,
        model_path="m",
        cuda_graph_config=SimpleNamespace(decode=Settings(**phase), prefill=Settings(**phase)),
    )
    known = {
        "copy": SimpleNamespace(deepcopy=lambda value: value),
        "resolving_view": lambda server: server,
        "get_device_memory_capacity": lambda _: gpu_mib,
        "declare_resolution": lambda server, _, **values: server.__dict__.update(values),
        "model_config_of": lambda server: server.get_model_config(),
        "post_capture_kv_sizing_planned": lambda _: True,
    }
    executable(sglang / "srt/arg_groups/memory_hook.py", "handle_gpu_memory_settings", known)(settings)
    found: float = settings.mem_fraction_static
    return found


def cell_of_newer(sglang: Path, layers: int, draft_layers: int) -> int:
    """Bytes per token of the KV caches of a model and of a STANDALONE draft model, as 0.5.23 counts them."""
    configurator = SimpleNamespace(_compute_cell_size=lambda *_: CELL_BYTES)
    cache = SimpleNamespace(
        kv_cache_dtype_str="auto",
        is_draft_worker=False,
        pp_size=1,
        layer_info=SimpleNamespace(num_effective_layers=layers),
        model_config=SimpleNamespace(context_len=32_768, hf_config=None),
        spec_aux_config=SimpleNamespace(eagle_draft_num_layers=draft_layers),
        spec_algorithm=SimpleNamespace(
            is_eagle=lambda: False, is_standalone=lambda: True, is_dflash_family=lambda: False
        ),
        fused_entry_bytes=lambda _: None,
    )
    known = dict.fromkeys(("get_parallel", "get_schedule", "get_memory"), Settings)
    executable(sglang / "srt/model_executor/pool_configurator.py", "DefaultPoolConfigurator.__init__", known)(
        configurator, cache
    )
    found: int = configurator._cell_size
    return found


def main(older: Path, newer: Path) -> dict[str, Any]:
    """The content of the fixture."""
    set_ups = list(product(GPUS_MIB, TENSOR_PARALLEL, ALGORITHMS))
    names = ("gpu_mib", "tensor_parallel", "algorithm", "fraction")
    return {
        "fractions": {
            "0.5.8.post1": [
                dict(zip(names, (*each, fraction_of_older(older, *each)), strict=True)) for each in set_ups
            ],
            "0.5.23": [
                dict(zip(names, (*each, fraction_of_newer(newer, *each)), strict=True)) for each in set_ups
            ],
        },
        "cells_of_0.5.23": [
            {
                "layers": layers,
                "draft_layers": draft,
                "bytes": CELL_BYTES,
                "with_draft": cell_of_newer(newer, layers, draft),
            }
            for layers, draft in LAYERS
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(*(Path(folder) / "sglang" for folder in sys.argv[1:])), indent=1))
