"""What is printed, and file names, where not everything is UTF-8; and standard streams that are closed."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.cli import terminal
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError
from tests.support.command import LONG_S, Done, environment, run_saccade

ODD = os.fsdecode(b"caf\xe9.mp4")
SHORT = ["--end", "0.3", "--detect", "person"]
ENCODINGS = ["ascii", "latin-1", "cp1252", "cp437", "utf-8"]


def in_encoding(name: str, *arguments: object, cwd: Path) -> Done:
    return run_saccade(*arguments, cwd=cwd, env={**environment(), "PYTHONIOENCODING": name}, encoding=name)


def in_shell(line: str, cwd: Path) -> Done:
    """Run a line of the shell in which `saccade` is the command."""
    function = f'saccade() {{ {shlex.quote(sys.executable)} -m saccade "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", function + line],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_summary_is_printed_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    done = in_encoding(encoding, "run", DEMO_CLIP, *SHORT, "--jsonl", "found.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    last = done.stdout.splitlines()[-1]
    assert last == ("→ found.jsonl" if encoding == "utf-8" else "-> found.jsonl")


@pytest.mark.parametrize("arguments", [["run", "--help"], ["configs", "manual"], ["configs"], ["run", "café→.mp4"]])
def test_help_texts_and_errors_are_printed_in_ascii(tmp_path: Path, arguments: list[str]) -> None:
    # What is not ASCII could not be decoded.
    done = in_encoding("ascii", *arguments, *(SHORT if "café→.mp4" in arguments else []), cwd=tmp_path)
    assert done.returncode == (2 if "café→.mp4" in arguments else 0)
    assert "Error" not in done.stderr
    assert len(done.stderr.splitlines()) == (done.returncode == 2)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_has_the_same_value_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", printed)
    value = {"text": "ein „Tisch“ → 日本 😀"}
    print(terminal.json_text(value))
    printed.flush()
    assert json.loads(printed.buffer.getvalue()) == value  # type: ignore[attr-defined]


def test_a_file_whose_name_is_not_utf8_goes_through_everything(tmp_path: Path) -> None:
    shutil.copy(DEMO_CLIP, tmp_path / ODD)
    out, heat, folder = (os.fsdecode(name) for name in (b"out\xff-{stream}.mp4", b"heat\xff.png", b"kept\xff"))
    outputs = ["--out", out, "--heatmap", heat, "--store", folder, "--rule", "seen=person", "--jsonl", "-"]
    done = run_saccade("run", ODD, *SHORT, *outputs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["stream"] for line in done.stdout.splitlines()} == {"caf"}
    assert done.stderr.splitlines()[1:] == ["→ out\\udcff-{stream}.mp4", "→ heat\\udcff.png"]
    for name in (b"out\xff-caf.mp4", b"heat\xff.png", b"kept\xff/events.db"):
        assert (tmp_path / os.fsdecode(name)).stat().st_size > 0
    probed = run_saccade("probe", ODD, "--json", cwd=tmp_path)
    assert json.loads(probed.stdout)["source"] == ODD


def test_a_missing_file_is_named_as_yaml_has_it(tmp_path: Path) -> None:
    done = run_saccade("run", ODD, *SHORT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "saccade: no such file: caf\\udce9.mp4\n")


def test_a_configuration_names_any_file(tmp_path: Path) -> None:
    file = tmp_path / "cameras.yaml"
    file.write_text('source: "caf\\udce9.mp4"\ndetect: person\nsinks: ["\\udcff.jsonl"]\n')
    config = load(file, {})
    assert (config.source, config.sinks) == (ODD, [os.fsdecode(b"\xff.jsonl")])
    file.write_text('source: x\ndetect: "caf\\udce9"\n')
    with pytest.raises(ConfigError, match="detect"):
        load(file, {})
    with pytest.raises(ConfigError, match="SOURCE: String should have at most 4096"):
        load(None, {"source": ODD * 1000, "detect": "person"})


def test_images_of_a_folder_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"d\xe9")
    folder.mkdir()
    for name in (b"\xff1", b"\xff2.png", b"ok.jpg"):
        Image.new("RGB", (40, 30)).save(folder / os.fsdecode(name), "PNG")
    done = run_saccade("run", str(folder), "--detect", "person", "--jsonl", "-", "-q", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("line", "code", "out", "error"),
    [
        ("run clip.mp4 --end .3 --detect person --jsonl - >&-", 2, "", "standard output: it is closed"),
        ("run clip.mp4 --end .3 --detect person --jsonl f.jsonl >&-", 0, "", ""),
        ("run clip.mp4 --end .3 --detect person --jsonl f.jsonl --out f.mp4 >&- 2>&- <&-", 0, "", ""),
        ("run none.mp4 --detect person 2>&-", 2, "", ""),
        ("image none.png --detect person >&-", 2, "", "no such file"),
        ("configs >&-", 0, "", ""),
        ("--help >&-", 0, "", ""),
        ("run --help >&-", 0, "", ""),
        ("configs manual | head -1", 0, "# ", ""),
        ("run clip.mp4 --detect person --jsonl - -q | head -c 20", 0, '{"schema":"saccade/2', ""),
    ],
)
def test_closed_streams_end_in_one_line_or_none(tmp_path: Path, line: str, code: int, out: str, error: str) -> None:
    shutil.copy(DEMO_CLIP, tmp_path / "clip.mp4")
    done = in_shell(f"saccade {line}", tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(out)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == bool(error), done.stderr
    assert error in done.stderr


def test_records_are_alone_on_standard_output_when_standard_error_is_closed(tmp_path: Path) -> None:
    shutil.copy(DEMO_CLIP, tmp_path / "clip.mp4")
    done = in_shell("saccade run clip.mp4 --end .3 --detect person --jsonl - 2>&-", tmp_path)
    assert done.returncode == 0
    assert [json.loads(line)["frame"] for line in done.stdout.splitlines()] == [0, 1, 2]
