"""The plugin in a real SGLang: SGLang loads it, and engines whose pages differ give them different names."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dps_sglang.install import install as install_plugin
from dps_sglang.sharing import REPLACED
from e2e.real_sglang.local_sglang import PYTHON, install

pytestmark = pytest.mark.timeout(2400)

SECONDS = 600.0


def test_plugin_is_loaded_and_names_pages_by_all_that_determines_them(tmp_path: Path) -> None:
    install()
    plugin, models = tmp_path / "plugin", tmp_path / "models"
    models.mkdir()
    install_plugin(plugin)
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("check_plugin.py"), models],
        env=os.environ | {"PYTHONPATH": str(plugin)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "hooked": [
            "__init__",
            "_build_sidecar_transfers",
            "_draft_extend_for_prefill",
            "_get_batch_zero_copy_impl",
            "_put_batch_zero_copy_impl",
            "attach_hicache_storage_wrapped",
            "batch_get_v1",
            "batch_set_v1",
            "begin_weight_update",
            "check_weights",
            "clear",
            "end_weight_update",
            "flush_cache",
            "generate_request",
            "get_stats",
            "release_memory_occupation",
            "resolved_dict",
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        ],
        "Mooncake tags that equal the first engine's": {
            "same weights elsewhere": True,
            "other weights": False,
            "other data type of the KV cache": False,
            "other quantization": False,
            "EAGLE": False,
            "LoRA": False,
            "several workers for HTTP": False,
            "unknown weights": False,
            "unsupported version": False,
        },
        "other storage can be attached": False,
        "Mooncake tags that are used again after the weights were replaced": [],
        "store opened afterwards has the first tag": False,
        "problems": [REPLACED],
    }
