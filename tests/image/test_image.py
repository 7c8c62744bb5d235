"""The image as people run it: hardened, stopped, as a user it does not know, in a folder it may not write."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.image.conftest import run
from tests.support import REPO

pytestmark = pytest.mark.image

ASSETS = REPO / "pipeline" / "assets"
OPTIONS = "--network none --read-only --tmpfs /tmp:exec --cap-drop ALL --security-opt no-new-privileges"
HARDENED = OPTIONS.split(" ")
DETECT = ["run", "/in/demo.mp4", "--detect", "person"]


def docker_run(image: str, *arguments: str, options: tuple[str, ...] = (), check: bool = True) -> str:
    command = ["docker", "run", "--rm", *HARDENED, "-v", f"{ASSETS}:/in:ro", *options, image, *arguments]
    done = run(command, check=check)
    return done.stdout + done.stderr


@pytest.mark.parametrize("user", ["1000:1000", "4321:4321"])
def test_it_finds_people_as_any_user_without_a_writable_root(image: str, tmp_path: Path, user: str) -> None:
    tmp_path.chmod(0o777)
    docker_run(image, *DETECT, "--jsonl", "found.jsonl", options=("--user", user, "-v", f"{tmp_path}:/data"))
    records = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(records) == 200
    assert sum(bool(record["objects"]) for record in records) > 100


def test_a_folder_of_root_is_named_with_the_command_that_mends_it(image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    said = docker_run(image, *DETECT, "--jsonl", "a.jsonl", options=("-v", f"{tmp_path}:/data"), check=False)
    assert "runs as uid 1000; run `sudo chown -R 1000:1000`" in said
    assert "Traceback" not in said


def test_a_missing_part_is_said_without_pip(image: str) -> None:
    code = "from saccade.distribution import install_command; print(install_command('mqtt'))"
    done = run(["docker", "run", "--rm", "--entrypoint", "python", image, "-c", code])
    assert "pip install" not in done.stdout
    assert "--build-arg EXTRAS=" in done.stdout


@pytest.mark.parametrize("signal", [(), ("--signal", "SIGTERM")], ids=["docker stop", "SIGTERM"])
@pytest.mark.parametrize("after_s", [0.3, 1.5, 8])
def test_it_stops_within_its_grace_period(image: str, after_s: float, signal: tuple[str, ...]) -> None:
    run(
        [
            "docker",
            "run",
            "-d",
            "--name",
            "stopped",
            *HARDENED,
            "-v",
            f"{ASSETS}:/in:ro",
            image,
            *DETECT,
            "--tiles",
            "2",
        ]
    )
    try:
        time.sleep(after_s)
        run(["docker", "stop", *signal, "-t", "20", "stopped"])
        state = json.loads(run(["docker", "inspect", "stopped"]).stdout)[0]["State"]
        assert state["ExitCode"] in ((0, 130, 143) if signal else (130,))  # 143: of tini, before Python runs
    finally:
        run(["docker", "rm", "-f", "stopped"], check=False)


def test_a_changed_line_makes_a_small_layer_only(image: str, tmp_path: Path) -> None:
    def layers(name: str) -> list[str]:
        found: list[str] = json.loads(run(["docker", "inspect", name]).stdout)[0]["RootFS"]["Layers"]
        return found

    run(["git", "clone", "-q", REPO, tmp_path / "copy"])
    with (tmp_path / "copy" / "pipeline" / "__init__.py").open("a") as module:
        module.write("# one line more\n")
    changed = f"{image}-line"
    run(["docker", "build", "--network", "host", "-t", changed, tmp_path / "copy"])
    try:
        assert layers(changed)[:-1] == layers(image)[:-1]
    finally:
        run(["docker", "rmi", "-f", changed], check=False)


@pytest.mark.parametrize("file", ["compose.yaml", "configs/gpu-node/compose.yaml"])
def test_compose_takes_the_files(image: str, file: str) -> None:
    services = json.loads(run(["docker", "compose", "-f", file, "--profile", "*", "config", "--format", "json"]).stdout)
    for service in services["services"].values():
        assert service["tmpfs"] == ["/tmp:exec"]  # Triton loads from there what it compiles
        script = service["healthcheck"]["test"][-1]
        done = run(["docker", "run", "--rm", "--entrypoint", "python", image, "-c", script], check=False)
        assert "ConnectionRefusedError" in done.stderr  # it fails where nothing listens


def test_the_image_s_health_check_tells_a_server_that_hangs_from_none(image: str) -> None:
    check = json.loads(run(["docker", "inspect", image]).stdout)[0]["Config"]["Healthcheck"]["Test"][1:]
    alone = ["docker", "run", "--rm", "--network", "none", "--entrypoint"]
    assert run([*alone, check[0], image, *check[1:]], check=False).returncode == 0
    hangs = """
import socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 8080))
sys.exit(subprocess.call(sys.argv[1:]))
"""
    assert run([*alone, "python", image, "-c", hangs, *check], check=False).returncode == 1
