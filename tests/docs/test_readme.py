"""Every code block of every document, run in the order shown and as written, but for addresses and ports.

A document's blocks share one folder, which holds a short clip, an image and a model under the names that the documents
use, and its Python blocks one namespace. What cannot be run is listed in `PARSED` and `NOT_RUN`, each with the reason.
"""

from __future__ import annotations

import configparser
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import pytest
import typer.main
import yaml
from PIL import Image
from safetensors.torch import save_file

from saccade.engine import Engine
from saccade.pipeline import Controller, HttpServer, Local, Streams, load, serve
from saccade.pipeline.cli.main import app, main
from saccade.pipeline.cli.options import load_settings, settings_in, sources_in
from saccade.pipeline.config import RunConfig
from saccade.sinks import make_record
from saccade.sinks.messaging.mqtt_topics import Topics
from saccade.sources import open_source
from tests.engine.models.test_lora import matrices
from tests.sinks.test_record import FRAME, LATENCY, RESULT
from tests.support import REPO, tracked
from tests.support.cameras import free_port
from tests.support.documents import Block, blocks_of, commands_of, indented_code
from tests.support.engine import TINY, random_model, write_model
from tests.support.sinks.feed import feed, until, write
from tests.support.sinks.rule_events import BEGIN

pytestmark = pytest.mark.e2e

DOCUMENTS = sorted(tracked(".md"))

PARSED = {
    "mcp": "serves until its client goes: tests/pipeline/cli/mcp/test_mcp.py has the protocol's own",
    "demo": "serves until it is interrupted: tests/pipeline/api/test_demo.py runs it",
    "--http": "serves until it is interrupted: the curl commands are run with such a server",
    "--diff": "asks a running one: tests/pipeline/control/test_reload.py has it",
    "--ray": "needs a cluster: tests/e2e/cluster/test_ray.py has one",
    "mqtt:": "needs a broker: tests/sinks/messaging/test_mqtt.py has one",
    "/etc/": "is where a service has its configuration",
}
"""`saccade` commands of which only the command line is parsed, by how one of their words begins."""

NOT_RUN = {
    "mkdir": "prepares a folder for Docker",
    "docker": "needs its daemon: tests/image runs it",
    "helm": "needs a cluster: tests/test_deployment.py renders the chart",
    "ray": "starts a cluster: tests/e2e/cluster/test_ray.py has one",
    "npm": "loads weights from a registry",
    "tar": "unpacks what npm has loaded",
    "torchrun": "trains for minutes, on GPUs and with a data pack",
}
"""Commands that are not run at all, by their first word."""

IN_BROWSER = REPO / "docs" / "guides" / "feed.md"
"""The document whose JavaScript tests/e2e/test_feed_browser.py runs in a browser."""

OF_OTHERS = ("card.yaml", "configuration.yaml")
"""YAML of Home Assistant, in which the topics are checked."""

SERVER = "http://127.0.0.1:8080"
CLIP, IMAGE = "street.mp4", "street.jpg"
LONG_S = 120  # far beyond what any of these needs; only so that a hang fails


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documents suppose that a user has: six frames of the demo clip, an image, a model and an adapter."""
    folder = tmp_path_factory.mktemp("material")
    with (
        av.open(str(REPO / "pipeline/assets/demo.mp4")) as clip,
        av.open(str(folder / CLIP), "w") as short,
    ):
        clip.seek(10_000_000)
        video = short.add_stream("libx264", rate=10)
        video.width, video.height, video.pix_fmt = 640, 360, "yuv420p"
        for number, frame in zip(range(6), clip.decode(video=0), strict=False):
            if number == 0:
                frame.to_image().save(folder / IMAGE)
            frame.pts, frame.time_base = number, Fraction(1, 10)
            short.mux(video.encode(frame))
        short.mux(video.encode(None))
    (folder / "pipeline" / "assets").mkdir(parents=True)  # a clone, from which the first steps run
    shutil.copyfile(folder / CLIP, folder / "pipeline" / "assets" / "demo.mp4")
    (folder / "holiday").mkdir()
    Image.new("RGB", (64, 48), "white").save(folder / "holiday" / "1.png")
    model = random_model(TINY)
    write_model(folder / "moondream-2", TINY, model)
    save_file(matrices(model, 4, 5), folder / "shop.safetensors")
    return folder


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(REPO)) for path in DOCUMENTS])
def test_the_blocks_of_a_document_run_in_order(
    path: Path, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert indented_code(path) == [], "code is fenced, so that it has a language"
    blocks = blocks_of(path)
    shutil.copytree(material, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("SACCADE_TOKEN", "SACCADE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    namespace: dict[str, Any] = {}
    for block in blocks:
        try:
            run_block(block, namespace, monkeypatch)
        except Exception as error:
            error.add_note(f"in {path.relative_to(REPO)}:{block.line}")
            raise


LINKED = [path for path in DOCUMENTS if not path.is_relative_to(REPO / "docs")]
"""Links of the site lead to pages that are made when it is built: tests/docs/test_site.py builds it."""


@pytest.mark.parametrize("path", LINKED, ids=[str(path.relative_to(REPO)) for path in LINKED])
def test_links_and_paths_of_a_document_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)#]*)", text)]
    paths = re.findall(r"`((?:engine|pipeline|sinks|sources|tests|configs)/[\w/]+\.(?:py|yaml))`", text)
    places = [path.parent / link for link in links] + [REPO / name for name in paths if "NAME" not in name]
    assert [str(place) for place in places if not place.exists()] == []


def run_block(block: Block, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    match block.language:
        case "python":
            run_python(block, namespace)
        case "sh" if "curl " in block.text:
            run_requests(block)
        case "sh":
            for words in commands_of(block):
                run_command(words, monkeypatch)
        case "yaml" if block.title in OF_OTHERS:
            check_home_assistant(block)
        case "yaml":
            Path(block.title).write_text(block.text)
            load(Path(block.title), {}, source="street.mp4")
            Path(block.title).write_text(without_addresses(block.text))
        case "json":
            shown, made = json.loads(block.text), make_record(FRAME, RESULT, LATENCY)
            if shown["schema"] == BEGIN["schema"]:
                assert list(shown) == list(BEGIN)
                return
            assert shown.keys() == made.keys()
            assert shown["latency_ms"].keys() == made["latency_ms"].keys()
            assert shown["objects"][0].keys() == made["objects"][0].keys()
        case "ini":
            unit = configparser.ConfigParser(strict=True, interpolation=None)
            unit.optionxform = str  # type: ignore[assignment, method-assign]
            unit.read_string(block.text)
            run_command(shlex.split(unit["Service"]["ExecStart"]), monkeypatch)
        case "js":
            assert block.path == IN_BROWSER
        case "text":
            pass  # a drawing
        case language:
            pytest.fail(f"nothing runs blocks of '{language}'")


def check_home_assistant(block: Block) -> None:
    """Every topic and entity in a file of Home Assistant is one that the command beside it makes."""
    topics, named, entities = Topics("saccade"), list[str](), list[str]()

    def walk(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for name, one in value.items():
                walk(one, name)
        elif isinstance(value, list):
            for one in value:
                walk(one, key)
        elif key == "topic" or key.endswith("_topic"):
            named.append(value)
        elif key in ("entity_id", "entities", "camera_entity"):
            entities.append(value)

    walk(yaml.safe_load(block.text))
    known = {topics.count("hall", "person"), topics.stream_available("hall"), topics.events}
    assert set(named) <= known
    assert entities
    assert set(entities) <= {"binary_sensor.hall_visitor", "camera.hall"}
    if block.title == "configuration.yaml":
        assert topics.count("hall", "person") in named
        assert topics.stream_available("hall") in named
    page = block.path.read_text(encoding="utf-8")
    assert re.search(r'--name hall --rule "visitor=', page)


# ---- Python


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block; a feed's client gets one that ends after a few records."""
    if SERVER in block.text:
        with Engine.load("nano", device="cpu") as engine, Streams(engine) as streams, http_server(streams) as server:
            text = block.text.replace(SERVER, server.url)
            exec(compile("\n" * (block.line - 1) + text, str(block.path), "exec", dont_inherit=True), namespace)
        return
    if "ws://" not in block.text:
        exec(compile("\n" * (block.line - 1) + block.text, str(block.path), "exec", dont_inherit=True), namespace)
        return
    with feed("?token=sesame") as sink:
        sender = threading.Thread(target=send_some, args=(sink,))
        sender.start()
        text, found = re.subn(r"ws://127\.0\.0\.1:8765", sink.url, block.text)
        assert found == 1
        exec(compile("\n" * (block.line - 1) + text, str(block.path), "exec", dont_inherit=True), namespace)
        sender.join()


@contextmanager
def http_server(streams: Streams) -> Iterator[HttpServer]:
    server = serve(Controller(Local(streams)), port=0)
    try:
        yield server
    finally:
        server.close()


def send_some(sink: Any) -> None:
    until(lambda: sink.clients == 1)
    for index in range(3):
        write(sink, index=index)
    sink.close()


# ---- the command line


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = Path(words[0]).name
    if command == "make":
        targets = re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif command == "python":  # of this project: pytest would run itself, and training needs a data pack
        assert words[1] == "-m"
        assert find_spec(words[2])
        assert all((REPO / word).exists() for word in words[3:] if word.startswith("tests/"))
    elif command == "saccade":
        for address in filter(is_live, words):
            open_source(address if address != "webrtc:8081" else "webrtc:0").close()  # it connects when iterated
        if any(word.startswith(begun) for word in words for begun in PARSED):
            parse(words[1:])
        else:
            run_saccade([without_addresses(word) for word in words], monkeypatch)
    else:
        assert command in NOT_RUN, f"nothing runs '{command}'"


def run_saccade(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it in this process, which spares a start of Python and torch for each."""
    monkeypatch.setattr(sys, "argv", words)
    with receiver() as url:
        words[:] = [word.replace("https://example.org", url) for word in words]
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0, shlex.join(words)
    for flag, value in itertools.pairwise(words):
        if flag in ("--out", "--jsonl", "--trace") and value != "-":
            assert Path(value).stat().st_size > 0


def parse(words: list[str]) -> None:
    """Parse a command line as `saccade` does, and what it sets as `run` and `demo` do."""
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    name, chosen, rest = command.resolve_command(typer.Context(command), words)
    assert chosen is not None
    with chosen.make_context(name, rest) as context:
        file = context.params.get("config")
        if chosen.name == "run" and not (file and file.is_absolute()):
            keys = RunConfig.model_fields.keys() - {"source"}
            given = settings_in({key: value for key, value in context.params.items() if key in keys})
            load_settings({**sources_in(context.params["source"]), **given}, file)


def is_live(word: str) -> bool:
    return word.startswith(("rtsp:", "webrtc:"))


def without_addresses(text: str) -> str:
    """The same with a clip for each camera and a free port for each given one."""
    text = re.sub(r"rtsp://[\w.:@/]+|^webrtc:\d+$", as_clip, text)
    return re.sub(r"(ws://127\.0\.0\.1|^whep):\d+", lambda match: f"{match[1]}:{free_port()}", text)


def as_clip(address: re.Match[str]) -> str:
    """A clip that is called after a camera's address, as its stream would be."""
    path = Path("cameras", re.sub(r"\W+", "-", address[0].rpartition("@")[2]) + ".mp4")
    path.parent.mkdir(exist_ok=True)
    shutil.copyfile(CLIP, path)
    return str(path)


@contextmanager
def receiver() -> Iterator[str]:
    """A web server that takes whatever is posted."""

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Taker) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


# ---- requests


def run_requests(block: Block) -> None:
    """Run a block in a shell, with a server of streams for its requests."""
    with Engine.load("nano", device="cpu") as engine, Streams(engine) as streams, http_server(streams) as server:
        script, found = re.subn(r"localhost:8080", server.url.removeprefix("http://"), block.text)
        assert found
        done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.returncode == 0, done.stderr
        assert streams.names == []
