"""`make e2e` takes the cluster that it is given, kind's, or builds one; and never one that nobody named."""

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
    ("environment", "docker_works", "root", "way"),
    [
        ({"E2E_KUBECONFIG": "mine"}, True, True, "existing"),
        ({}, True, True, "kind"),
        ({}, True, False, "kind"),
        ({}, False, True, "self-built"),
    ],
)
def test_the_way(
    tmp_path: Path, environment: Mapping[str, str], docker_works: bool, root: bool, way: str
) -> None:
    command(tmp_path, "kind")
    assert choose({**environment, "PATH": str(tmp_path)}, docker_works, root) == way


def test_docker_without_kind_is_no_cluster(tmp_path: Path) -> None:
    assert choose({"PATH": str(tmp_path)}, docker_works=True, root=True) == "self-built"


def test_no_way_says_what_to_do() -> None:
    with pytest.raises(RefusedError, match="set E2E_KUBECONFIG and E2E_CONTEXT, or start docker with kind"):
        choose({}, docker_works=False, root=False)


def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str) -> Kube:
    command(tmp_path, "kubectl", f"echo {context}")
    monkeypatch.setattr("dps_testkit.cluster.kube.BIN", tmp_path)
    return Kube(tmp_path / "kubeconfig")


def test_a_context_that_nobody_named_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kube = kubectl(tmp_path, monkeypatch, "production")
    refuse_unknown(kube, "production")
    with pytest.raises(RefusedError, match="'production'; these tests install and delete things"):
        refuse_unknown(kube, "")


def test_kind_is_made_given_the_images_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kind itself needs docker and an image from a registry; this is what it would be told."""
    told = tmp_path / "told"
    for name in ("kind", "docker"):
        command(tmp_path, name, f'echo {name} "$@" >> {told}')
    kubectl(tmp_path, monkeypatch, "kind-dps-test")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    loads = []
    monkeypatch.setattr(
        "dps_testkit.cluster.providers.Cluster.load_images", lambda made: loads.append(made.load)
    )
    with cluster(tmp_path):
        pass
    assert told.read_text().splitlines() == [
        "docker info",
        f"kind create cluster --name dps-test --kubeconfig {tmp_path}/kubeconfig --wait 180s",
        "kind delete cluster --name dps-test",
    ]
    assert loads == [("kind", "load", "image-archive", "--name", "dps-test")]
