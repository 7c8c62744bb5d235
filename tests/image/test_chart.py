"""The Helm chart as Helm renders it, compared to the program that it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from saccade.pipeline.config.file import load
from tests.image.conftest import run
from tests.support import REPO
from tests.test_deployment import NODE, flags_of

pytestmark = pytest.mark.image

CHART = REPO / "configs" / "helm"


def rendered(helm: str, *settings: str) -> dict[str, dict[str, Any]]:
    done = run([helm, "template", "yard", CHART, *settings])
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}


def pod_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = objects["Deployment"]["spec"]["template"]
    return pod


def test_helm_finds_nothing_wrong(helm: str) -> None:
    run([helm, "lint", "--strict", CHART])


@pytest.mark.parametrize("storage_class", ["", "fast"])
def test_its_objects_belong_together(helm: str, storage_class: str) -> None:
    objects = rendered(helm, "--set", f"storageClass={storage_class},hostNetwork=true")
    assert set(objects) == {"ConfigMap", "PersistentVolumeClaim", "Service", "Deployment"}
    pod = pod_of(objects)
    assert objects["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert (pod["spec"]["hostNetwork"], pod["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert objects["PersistentVolumeClaim"]["spec"].get("storageClassName") == (storage_class or None)


def test_its_pod_has_no_rights(helm: str) -> None:
    spec = pod_of(rendered(helm))["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert "dnsPolicy" not in spec


def test_an_image_of_a_registry_with_its_credentials(helm: str) -> None:
    settings = "image=registry.example.com/saccade:1,imagePullSecrets[0].name=login"
    spec = pod_of(rendered(helm, "--set", settings))["spec"]
    assert spec["containers"][0]["image"] == "registry.example.com/saccade:1"
    assert spec["imagePullSecrets"] == [{"name": "login"}]


def test_it_runs_the_cameras_it_is_given(helm: str, tmp_path: Path) -> None:
    objects = rendered(helm, "--set", "workers=4", "--set-file", f"cameras={NODE / 'cameras.yaml'}")
    path = tmp_path / "cameras.yaml"
    path.write_text(objects["ConfigMap"]["data"]["cameras.yaml"])
    (container,) = pod_of(objects)["spec"]["containers"]
    flags = flags_of(container["args"])
    config = load(path, {"workers": flags["--workers"], "http": flags["--http"]})
    assert (config.workers, config.http, len(config.streams)) == (4, "0.0.0.0:8080", 2)
    assert {env["name"] for env in container["env"]} >= {"SACCADE_TOKEN"}  # which any address but 127.0.0.1 needs
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
    assert "subPath" not in mount  # such a file stays what it was when the pod began
    assert flags["--config"].startswith(mount["mountPath"] + "/")
    assert "checksum" not in json.dumps(pod_of(objects)["metadata"])  # by which another pod would take its place


def test_without_cameras_it_waits_for_them(helm: str, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(rendered(helm)["ConfigMap"]["data"]["cameras.yaml"])
    assert load(path, {"http": "0.0.0.0:8080", "workers": 2}).streams == []


def test_every_value_is_used() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(re.findall(r"\.Values\.(\w+)", (CHART / "templates" / "saccade.yaml").read_text())) == values.keys()
