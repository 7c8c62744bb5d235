"""An engine for all tests of the API, streams on it for each, and servers with other models, of random weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from saccade.engine import Engine
from saccade.pipeline import Streams
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.asset_files import PAGES
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.local import Local
from tests.support.control import controller_of
from tests.support.engine.material import (
    TINY,
    write_enclosing_model,
    write_model,
    write_outlining_model,
    write_refiner,
)

TOKEN = "sesame"


@pytest.fixture(scope="package")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


@pytest.fixture
def streams(engine: Engine) -> Iterator[Streams]:
    with Streams(engine) as those:
        yield those


@pytest.fixture(scope="package")
def photo() -> Image.Image:
    """Two people in a room."""
    with Image.open(PAGES.parent / "demo.jpg") as image:
        return Image.fromarray(np.asarray(image))


@pytest.fixture(scope="package")
def finder() -> Iterator[str]:
    """The address of a server whose model is nano."""
    with Engine.load("nano", device="cpu") as engine, Streams(engine) as streams:
        server = serve(controller_of(streams), port=0, token=TOKEN)
        yield server.url
        server.close()


@pytest.fixture(scope="package")
def outliner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose model outlines, though its paths mean nothing."""
    folder = write_outlining_model(tmp_path_factory.mktemp("models") / "outlining")
    with Engine.load(str(folder), device="cpu") as engine, Streams(engine) as streams:
        server = serve(controller_of(streams), port=0)
        yield server.url
        server.close()


@pytest.fixture(scope="package")
def refining(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose model outlines, and refines that."""
    models = tmp_path_factory.mktemp("models")
    folder, refiner = write_enclosing_model(models / "enclosing"), write_refiner(models / "refiner.pt")
    with Engine.load(str(folder), device="cpu", refiner=str(refiner)) as engine, Streams(engine) as streams:
        server = serve(controller_of(streams), port=0)
        yield server.url
        server.close()


@pytest.fixture(scope="package")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose second model writes texts, though they mean nothing; the first is nano."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", TINY)
    with (
        Engine.load("nano", device="cpu") as finding,
        Engine.load(str(folder), device="cpu") as talking,
        Streams(finding) as streams,
    ):
        server = serve(Controller(Local(streams, ask=talking)), port=0)
        yield server.url
        server.close()
