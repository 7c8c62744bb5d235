"""The Helm chart and the compose file of a GPU node: rendered without Helm or Docker, and compared to the program."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from saccade.pipeline.cli.main import app
from saccade.pipeline.config.file import load
from tests.support import REPO

CHART = REPO / "configs" / "helm"
NODE = REPO / "configs" / "gpu-node"
README = REPO / "pipeline" / "workers" / "README.md"


def render(template: str, values: dict[str, Any]) -> str:
    """What Helm makes of a template, for the few forms that ours uses; any other is an error."""

    def value(name: str) -> Any:
        if name == ".Release.Name":
            return "yard"
        found: Any = {"Values": values}
        for part in name.removeprefix(".").split("."):
            found = found[part]
        return found

    def shown(match: re.Match[str]) -> str:
        found = value(match[1])
        if match[2] in ("quote", "toJson"):
            return json.dumps(str(found) if match[2] == "quote" else found)
        return str(found).lower() if isinstance(found, bool) else str(found)

    def chosen(match: re.Match[str]) -> str:
        return match[2] if value(match[1]) else ""

    text = re.sub(r"\s*\{\{- if (\S+) }}(.*?)\s*\{\{- end }}", chosen, template, flags=re.DOTALL)
    text = re.sub(r"\{\{ (\.[\w.]+)(?: \| (quote|toJson))? }}", shown, text)
    assert "{{" not in text
    return text


def rendered(**changed: Any) -> dict[str, dict[str, Any]]:
    values = {**yaml.safe_load((CHART / "values.yaml").read_text()), **changed}
    template = (CHART / "templates" / "saccade.yaml").read_text()
    return {one["kind"]: one for one in yaml.safe_load_all(render(template, values))}


def flags_of(command: list[str]) -> dict[str, str]:
    """The flags of a command and their values, which the program itself takes, but for a file that is not here."""
    assert command[0] == "run"
    filled = [re.sub(r"\$\{\w+:-(.*?)}", r"\1", word) for word in command]  # as Compose does
    saccade = typer.main.get_command(app)
    with saccade.make_context("saccade", filled) as context:
        name, run, rest = saccade.resolve_command(context, filled)
        with run.make_context(name, rest, parent=context) as parsed:
            given = {key: value for key, value in parsed.params.items() if value not in (None, [], ())}
    flags = {flag: after for flag, after in zip(command, [*command[1:], ""], strict=True) if flag.startswith("--")}
    assert {flag[2:].replace("-", "_") for flag in flags} <= given.keys()
    return flags


@pytest.mark.parametrize("storage_class", ["", "fast"])
def test_the_chart_renders_to_objects_that_belong_together(storage_class: str) -> None:
    objects = rendered(storageClass=storage_class, hostNetwork=True)
    assert set(objects) == {"ConfigMap", "PersistentVolumeClaim", "Service", "Deployment"}
    pod = objects["Deployment"]["spec"]["template"]
    assert objects["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert (pod["spec"]["hostNetwork"], container["resources"]["limits"]["nvidia.com/gpu"]) == (True, 1)
    claimed = objects["PersistentVolumeClaim"]["spec"].get("storageClassName")
    assert claimed == (storage_class or None)


def test_the_chart_runs_what_it_is_given(tmp_path: Path) -> None:
    cameras = (NODE / "cameras.yaml").read_text()
    objects = rendered(cameras=cameras, workers=4)
    assert objects["ConfigMap"]["data"]["cameras.yaml"] == cameras
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    flags = flags_of(container["args"])
    path = tmp_path / "cameras.yaml"
    path.write_text(cameras)
    config = load(path, {"workers": flags["--workers"], "http": flags["--http"]})
    assert (config.workers, config.http, len(config.streams)) == (4, "0.0.0.0:8080", 2)
    assert {env["name"] for env in container["env"]} >= {"SACCADE_TOKEN"}  # which any address but 127.0.0.1 needs


def test_the_chart_without_cameras_waits_for_them(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(rendered()["ConfigMap"]["data"]["cameras.yaml"])
    assert load(path, {"http": "0.0.0.0:8080", "workers": 2}).streams == []


def test_the_node_s_compose_file_runs_workers_on_its_gpus() -> None:
    service = yaml.safe_load((NODE / "compose.yaml").read_text())["services"]["saccade"]
    assert flags_of(service["command"])["--workers"] == "${SACCADE_WORKERS:-2}"
    config = load(NODE / "cameras.yaml", {"workers": 2})
    assert config.http == "127.0.0.1:8080"
    assert len(config.each()) == 2
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    target = service["build"]["target"]
    assert re.search(rf"^FROM \S+ AS {target}$", (REPO / "Dockerfile").read_text(), re.MULTILINE)


def test_a_flag_that_the_program_does_not_have_is_found() -> None:
    with pytest.raises(typer.TyperException, match="--worker"):
        flags_of(["run", "--worker", "2"])
    with pytest.raises(typer.TyperException, match="valid integer"):
        flags_of(["run", "--workers", "many"])


def test_the_values_that_are_documented_are_the_chart_s() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    used = set(re.findall(r"\.Values\.(\w+)", (CHART / "templates" / "saccade.yaml").read_text()))
    assert used == values.keys()
    documented = set(re.findall(r"--set(?:-file)? (\w+)=", README.read_text() + (CHART / "values.yaml").read_text()))
    assert documented
    assert documented <= used


def test_a_changed_list_of_cameras_reaches_a_pod_that_runs() -> None:
    objects = rendered()
    pod = objects["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
    assert "subPath" not in mount  # such a file stays what it was when the pod began
    assert container["args"][container["args"].index("--config") + 1].startswith(mount["mountPath"] + "/")
    assert "checksum" not in json.dumps(pod["metadata"])  # by which another would take its place
