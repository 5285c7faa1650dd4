"""Real vLLM in pods on the CPU, started with the operator's command line; the speculative pool has suffix decoding.

The image contains only Debian and Python; vLLM, a library that it needs and a tiny model are mounted from this machine
by hostPath.
"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from openai import OpenAI

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.http import metric
from e2e.node.conftest import A100
from e2e.node.mounts import IMAGE, LOAD_SECONDS, load_image, mounted
from e2e.node.sessions import Turn, alternating, messages, turns
from e2e.paper_engines.engines import VLLM_INSTALLED, VLLM_VENV, prepare

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not VLLM_INSTALLED, reason="vLLM is not installed; make e2e-paper-engines installs it"
    ),
]

MODEL = "/opt/tiny"
QUESTIONS = alternating(6)
ANSWER_TOKENS = 32
BLOCK_TOKENS = 32
LIBRARY = "libnuma.so.1"
CPU = [
    *("--dtype", "float32", "--enforce-eager", "--generation-config", "vllm", "--max-model-len", "16384"),
    *("--kv-cache-memory-bytes", "256m", "--block-size", str(BLOCK_TOKENS)),
]
"""The flags of e2e/paper_engines/launch-vllm that the operator does not set."""
ENV = {
    "PATH": f"{VLLM_VENV}/bin:/usr/bin:/bin",
    "LD_LIBRARY_PATH": "/opt/libraries",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HOME": "/tmp",
}


def vllm(model: Path, libraries: Path) -> Manifest:
    """A DPSRouter with real vLLM engines."""
    folders = {VLLM_VENV.name: VLLM_VENV, "libraries": libraries, Path(MODEL).name: model}
    pool = {
        "podTemplate": mounted("engine", **folders),
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": A100},
    }
    return {
        "apiVersion": "dpsrouter.io/v1alpha1",
        "kind": "DPSRouter",
        "metadata": {"name": "vllm"},
        "spec": {
            "model": {"name": MODEL, "servedName": "tiny"},
            "engine": {
                "runtime": "VLLM",
                "image": IMAGE,
                "version": "0.32.0",
                "args": CPU,
                "env": [{"name": name, "value": value} for name, value in ENV.items()],
            },
            "pools": {"speculative": {"speculation": {"algorithm": "Suffix"}, **pool}, "greedy": pool},
            "gateway": {
                "replicas": 1,
                "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
                "podTemplate": mounted("gateway", **{Path(MODEL).name: model}),
            },
        },
    }


@dataclass(frozen=True)
class Played:
    """A session that uses both pools.

    greedy_answers: what the greedy engine answers to the same prompts. accepted: draft tokens that each engine has
    accepted.
    """

    session: list[Turn]
    greedy_answers: list[str]
    accepted: dict[str, float]


@pytest.fixture(scope="module")
def played(node: Cluster, kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    if node.state is None:
        pytest.skip("the nodes of this cluster cannot mount this machine's folders")
    libraries = tmp_path_factory.mktemp("libraries")
    load_image(node, tmp_path_factory.mktemp("image"))
    (library,) = Path("/usr/lib").glob(f"*/{LIBRARY}")
    shutil.copy(library, libraries)
    kube.apply(vllm(prepare(), libraries))
    kube.until("vllm", LOAD_SECONDS, Ready="True")
    with (
        node.reach(kube, "vllm-gateway", 8000) as gateway,
        node.reach(kube, "vllm-greedy", 8000) as greedy,
        node.reach(kube, "vllm-speculative", 8000) as speculative,
    ):
        session = list(turns(gateway, "tiny", QUESTIONS, ANSWER_TOKENS))
        answers = greedy_answers(greedy, session)
        accepted = {
            pool: asyncio.run(metric(url, "vllm:spec_decode_num_accepted_tokens_total"))
            for pool, url in (("greedy", greedy), ("speculative", speculative))
        }
        yield Played(session, answers, accepted)
    kube.kubectl("delete", "dpsrouter", "vllm")


def greedy_answers(url: str, session: list[Turn]) -> list[str]:
    """The answers of the engine at `url` to the session's prompts."""
    said = [turn.answer for turn in session]
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        answers = [
            client.chat.completions.create(
                model="tiny",
                messages=messages(QUESTIONS[:asked], said),
                max_tokens=ANSWER_TOKENS,
                temperature=0,
            )
            for asked in range(1, len(QUESTIONS) + 1)
        ]
    return [answer.choices[0].message.content or "" for answer in answers]


def test_turns_are_routed_to_engines_started_by_the_operator(played: Played) -> None:
    assert [(turn.number, turn.pool) for turn in played.session] == [
        (number, "speculative" if number % 2 == 0 else "greedy") for number in range(1, 7)
    ]


def test_prompt_lengths_match_the_engines_count(played: Played) -> None:
    lengths = [turn.prompt_tokens for turn in played.session]
    assert [turn.engine_prompt_tokens for turn in played.session] == lengths
    assert [turn.delta_tokens for turn in played.session] == [
        lengths[0],
        *(after - before for before, after in pairwise(lengths)),
    ]


def test_each_engine_has_cached_the_turns_it_served(played: Played) -> None:
    session = played.session
    assert [turn.cached_tokens for turn in session[:2]] == [0, 0]
    for before, after in zip(session, session[2:], strict=False):
        assert before.pool == after.pool
        assert before.prompt_tokens - BLOCK_TOKENS < after.cached_tokens < after.prompt_tokens


def test_answers_of_both_pools_equal_those_of_the_greedy_engine(played: Played) -> None:
    assert [turn.answer for turn in played.session] == played.greedy_answers


def test_only_the_speculative_engine_verifies_drafts(played: Played) -> None:
    assert played.accepted["greedy"] == 0
    assert played.accepted["speculative"] > 0


@pytest.mark.usefixtures("played")
def test_engines_prepare_no_usage_statistics(kube: Kube) -> None:
    for pool in ("speculative", "greedy"):
        files = kube.kubectl("exec", f"deployment/vllm-{pool}", "--", "find", "/tmp", "-name", "usage_stats*")
        assert files == ""
