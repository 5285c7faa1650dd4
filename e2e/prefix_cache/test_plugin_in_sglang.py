"""The plugin in a real SGLang: SGLang loads it, and pages are unchanged after a round trip through the store."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dps_sglang.install import install as install_plugin
from e2e.real_sglang.local_sglang import PYTHON, install

pytestmark = pytest.mark.timeout(2400)

SECONDS = 600.0


def test_plugin_is_loaded_and_engines_read_each_others_pages(tmp_path: Path) -> None:
    install()
    plugin, pages = tmp_path / "plugin", tmp_path / "pages"
    for folder in (plugin, pages):
        folder.mkdir()
    install_plugin(plugin)
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("check_plugin.py"), pages],
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
        "same": [True] * 9,
        "pages found": 8,
        "pages found if the draft model has a KV memory pool": 0,
        "pages found with another quantization": 0,
        "pages found with LoRA": 0,
        "pages found without a secret": 0,
        "pages found with EAGLE": 0,
        "pages found with another version of SGLang": [0, 0],
        "pages found with several workers for HTTP": 0,
        "Mooncake tags that equal the first engine's": {
            "same weights elsewhere": True,
            "other weights": False,
            "other data type of the KV cache": False,
            "EAGLE": False,
            "unknown weights": False,
            "unsupported version": False,
        },
        "problems of NGRAM with Mooncake and no refill": [""],
        "problems of STANDALONE with Mooncake and no refill": [
            "sglang.no_such_function cannot be used: module 'sglang' has no attribute 'no_such_function'"
        ],
        "other storage can be attached": False,
        "pages found after the weights were replaced": 0,
        "pages found by a storage that was opened afterwards": 0,
        "Mooncake tags that are used again after the weights were replaced": [],
    }
