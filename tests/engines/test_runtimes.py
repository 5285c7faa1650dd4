"""What both runtimes have in common: images, versions and draft models."""

import pytest

from dps_engines.launch import Algorithm, EngineError, Launch, Speculation
from dps_engines.registry import RUNTIMES

IMAGES = [
    ("SGLang", None, None, "lmsysorg/sglang:v0.5.23", "0.5.23"),
    ("SGLang", None, "0.5.24", "lmsysorg/sglang:v0.5.24", "0.5.24"),
    ("SGLang", "reg/sglang:v0.5.23-cu130", None, "reg/sglang:v0.5.23-cu130", "0.5.23"),
    ("SGLang", "reg:5000/sglang:nightly", None, "reg:5000/sglang:nightly", "0.5.23"),
    ("SGLang", "reg/sglang:nightly", "0.5.24", "reg/sglang:nightly", "0.5.24"),
    ("VLLM", None, None, "vllm/vllm-openai:v0.32.0", "0.32.0"),
    ("VLLM", None, "0.33.0", "vllm/vllm-openai:v0.33.0", "0.33.0"),
    ("VLLM", "reg/vllm-suffix:v0.33.0", None, "reg/vllm-suffix:v0.33.0", "0.33.0"),
]


@pytest.mark.parametrize(("runtime", "image", "version", "wanted_image", "wanted_version"), IMAGES)
def test_version_selects_the_default_image_and_image_tag_selects_the_default_version(
    runtime: str, image: str | None, version: str | None, wanted_image: str, wanted_version: str
) -> None:
    assert RUNTIMES[runtime].image(image, version) == wanted_image
    assert RUNTIMES[runtime].version(image, version) == wanted_version


@pytest.mark.parametrize(
    ("runtime", "version", "message"),
    [
        ("SGLang", "0.5.8.post1", r"SGLang 0\.5\.8\.post1 is not supported; use 0\.5\.23 or newer"),
        ("VLLM", "0.31.2", r"vLLM 0\.31\.2 is not supported; use 0\.32\.0 or newer"),
    ],
)
def test_version_older_than_the_oldest_supported_is_refused(runtime: str, version: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        RUNTIMES[runtime].check_version(version)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("algorithm", ["Standalone", "Eagle", "Eagle3"])
def test_missing_draft_model_is_refused(runtime: str, algorithm: Algorithm) -> None:
    launch = Launch("m", "m", 30000, speculation=Speculation(algorithm))
    with pytest.raises(EngineError, match=f"draftModel: {algorithm} needs it; set it, or choose Ngram"):
        RUNTIMES[runtime].arguments(launch)
