"""The sizes of models that the operator reads from a Hub, on a real API server."""

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.operator import StartOperator
from e2e.cluster.routers import router, speculation

pytest_plugins = ["e2e.cluster.fixtures"]

# Those of Qwen2.5-7B and Qwen2.5-1.5B.
TARGET = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
DRAFT = {
    **TARGET,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of a server with the configurations of two models."""
    for name, config in {"target": TARGET, "draft": DRAFT}.items():
        file = tmp_path / "hub/org" / name / "resolve/main/config.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(config))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "hub"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_memory_is_computed_from_configurations_and_stays_when_the_hub_is_unavailable(
    kube: Kube, start_operator: StartOperator, hub: str
) -> None:
    operator = start_operator("--hub-endpoint", hub)
    models = {"name": "org/target"}
    draft = speculation(algorithm="Standalone", draftModel="org/draft")
    kube.apply(router(model=models, engine={"version": "0.5.8.post1"}, **draft))
    kube.until("qwen", Ready="True", Progressing="Settled")
    engine = kube.get("deployment", "qwen-speculative")
    assert engine["spec"]["template"]["spec"]["containers"][0]["args"][-2:] == [
        "--mem-fraction-static",
        "0.59",
    ]
    status = kube.get("dpsrouter", "qwen")["status"]
    assert [(model["name"], model["parameters"]) for model in status["models"]] == [
        ("org/target", 7_615_616_512),
        ("org/draft", 1_543_714_304),
    ]
    operator.stop()
    start_operator("--hub-endpoint", "http://127.0.0.1:1")
    kube.patch("dpsrouter", "qwen", {"spec": {"pools": {"greedy": {"replicas": 2}}}})
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert kube.get("deployment", "qwen-speculative")["spec"]["template"] == engine["spec"]["template"]
    assert kube.get("dpsrouter", "qwen")["status"]["models"] == status["models"]
    kube.apply(router("other", model={"name": "org/other"}))
    kube.until("other", SpecValid="Accepted")
    assert kube.condition("other", "SpecValid")["message"].startswith(
        "the spec is valid; the size of org/other (http://127.0.0.1:1 does not answer the operator) is not known"
    )
