"""The flags of the command line are the settings of a configuration, declared once."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import typer
from click import Parameter
from typer.testing import CliRunner

from saccade.pipeline.cli.main import app
from saccade.pipeline.cli.sections import sections
from saccade.pipeline.config import RunConfig, flags_of
from tests.support.command import Command

NOT_SETTINGS = {"config", "trace", "quiet", "help"}


def parameters_of(command: str) -> dict[str, Parameter]:
    group = typer.main.get_command(app)
    found = group.commands[command].params  # type: ignore[attr-defined]
    return {str(parameter.name): parameter for parameter in found}


def test_every_flag_of_run_is_a_setting_and_helps_with_its_text() -> None:
    parameters = parameters_of("run")
    assert parameters.keys() - NOT_SETTINGS == RunConfig.model_fields.keys() - {"streams"}
    for key in parameters.keys() - NOT_SETTINGS:
        described = RunConfig.model_fields[key].description
        assert str(parameters[key].help).startswith(str(described)), key  # type: ignore[attr-defined]
        assert parameters[key].default is None, f"{key}: its default is the model's"
    assert {key: parameters[key].opts for key in parameters.keys() - NOT_SETTINGS - {"source"}} == {
        key: flags_of(key) for key in parameters.keys() - NOT_SETTINGS - {"source"}
    }


def test_the_help_of_run_is_in_sections(tmp_path: Path, saccade: Command) -> None:
    shown = saccade("run", "--help", cwd=tmp_path).stdout
    places = [shown.find(f"─ {heading.capitalize()} ─") for heading in sections()]
    assert places[0] > 0
    assert places == sorted(places)
    assert sorted(key for keys in sections().values() for key in keys) == sorted(RunConfig.model_fields)


def test_no_command_declares_a_setting_a_second_time() -> None:
    for command in ("demo", "image", "probe"):
        for key, parameter in parameters_of(command).items():
            if key in RunConfig.model_fields and key not in ("source", "out") and (command, key) != ("demo", "tls"):
                described = RunConfig.model_fields[key].description
                assert str(parameter.help).startswith(str(described)), (command, key)  # type: ignore[attr-defined]


def test_commands_keep_their_own_docstrings() -> None:
    group = typer.main.get_command(app)
    assert inspect.cleandoc(group.commands["run"].help or "").startswith("Detect objects")  # type: ignore[attr-defined]


def test_help_shows_no_types_of_switches_and_arguments() -> None:
    for command in ((), ("run",), ("image",), ("search",), ("backtest",), ("bench", "frame"), ("config", "check")):
        shown = CliRunner().invoke(app, [*command, "--help"]).stdout
        assert "--help" in shown
        assert re.findall(r"<[a-z\[\] ]+>", shown) == []
    commands = re.findall(r"^│ (\w+) ", CliRunner().invoke(app, ["-h"]).stdout, re.MULTILINE)
    assert commands[0] == "run"
