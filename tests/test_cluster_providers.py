"""End-to-end tests use an existing cluster, kind or a self-built one, and refuse a cluster that was not named."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dps_testkit.cluster.kube import Kube, refuse_unknown
from dps_testkit.cluster.providers import choose, cluster
from dps_testkit.errors import RefusedError


def command(folder: Path, name: str, script: str = "exit 0") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("environment", "docker_works", "root", "provider"),
    [
        ({"E2E_KUBECONFIG": "mine"}, True, True, "existing"),
        ({}, True, True, "kind"),
        ({}, True, False, "kind"),
        ({}, False, True, "self-built"),
    ],
)
def test_provider_is_chosen_from_environment(
    tmp_path: Path, environment: Mapping[str, str], docker_works: bool, root: bool, provider: str
) -> None:
    command(tmp_path, "kind")
    assert choose({**environment, "PATH": str(tmp_path)}, docker_works, root) == provider


def test_docker_without_kind_falls_back_to_self_built(tmp_path: Path) -> None:
    assert choose({"PATH": str(tmp_path)}, docker_works=True, root=True) == "self-built"


def test_error_without_provider_lists_the_options() -> None:
    with pytest.raises(RefusedError, match="set E2E_KUBECONFIG and E2E_CONTEXT, or start docker with kind"):
        choose({}, docker_works=False, root=False)


def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str) -> Kube:
    command(tmp_path, "kubectl", f"echo {context}")
    monkeypatch.setattr("dps_testkit.cluster.kube.BIN", tmp_path)
    return Kube(tmp_path / "kubeconfig")


def test_context_that_was_not_named_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kube = kubectl(tmp_path, monkeypatch, "production")
    refuse_unknown(kube, "production")
    with pytest.raises(RefusedError, match="'production'; these tests install and delete things"):
        refuse_unknown(kube, "")


def test_kind_cluster_is_created_loaded_with_images_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kind needs docker and an image from a registry, so fakes record the commands instead."""
    log = tmp_path / "commands"
    for name in ("kind", "docker"):
        command(tmp_path, name, f'echo {name} "$@" >> {log}')
    kubectl(tmp_path, monkeypatch, "kind-dps-test")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    loads = []
    monkeypatch.setattr(
        "dps_testkit.cluster.providers.Cluster.load_images", lambda cluster: loads.append(cluster.load)
    )
    with cluster(tmp_path):
        pass
    assert log.read_text().splitlines() == [
        "docker info",
        f"kind create cluster --name dps-test --kubeconfig {tmp_path}/kubeconfig --wait 180s",
        "kind delete cluster --name dps-test",
    ]
    assert loads == [("kind", "load", "image-archive", "--name", "dps-test")]
