from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import av
import pytest
from PIL import Image

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import RunConfig, flags_of
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import one_line
from tests.support import REPO
from tests.support.command import LONG_S, Command, environment, run_saccade, start_saccade
from tests.support.engine import GOLDEN, TINY, random_model, write_golden_case, write_model

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"

MakeClip = Callable[..., Path]


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OUTPUTS = ["--detect", "person", "--out", "out.mp4", "--jsonl", "out.jsonl"]

PERSON = ["--detect", "person"]

BAD_INPUT = {
    "missing file": (["run", "none.mp4", *OUTPUTS], "none.mp4"),
    "text named mp4": (["run", "text.mp4", *OUTPUTS], "text.mp4"),
    "zero bytes": (["run", "empty.mp4", *OUTPUTS], "empty"),
    "no video stream": (["run", "sound.mp4", *OUTPUTS], "no video stream"),
    "unknown class": (["run", "clip.mp4", *OUTPUTS, "--detect", "unicorn"], "unicorn"),
    "unknown model": (["run", "clip.mp4", *OUTPUTS, "--model", "no-such-model"], "no-such-model"),
    "invalid YAML": (["run", "--config", "broken.yaml", *OUTPUTS], "broken.yaml:3:1: invalid YAML"),
    "unwritable video": (["run", "clip.mp4", *PERSON, "--out", "none/out.mp4"], "none/out.mp4"),
    "unwritable records": (["run", "clip.mp4", *OUTPUTS, "--jsonl", "none/out.jsonl"], "none/out.jsonl"),
    "unwritable image": (["image", "photo.png", *PERSON, "--out", "none/found.png"], "none/found.png"),
    "image of no format": (["image", "photo.png", *PERSON, "--out", "found.xyz"], "found.xyz"),
    "video of no format": (["run", "clip.mp4", *PERSON, "--out", "found.xyz"], "found.xyz"),
    "unknown class in an image": (["image", "photo.png", "--detect", "unicorn", "--out", "found.png"], "unicorn"),
    "unknown device": (["run", "clip.mp4", *OUTPUTS, "--device", "toaster"], "toaster"),
    "unknown dtype": (["run", "clip.mp4", *OUTPUTS, "--dtype", "int4"], "'bfloat16', 'float16' or 'fp8', got 'int4'"),
    "unknown dtype of an image": (["image", "photo.png", *PERSON, "--dtype", "int4"], "'fp8', got 'int4'"),
    "unknown dtype of a demo": (["demo", "--dtype", "int4"], "'fp8', got 'int4'"),
    "unknown dtype of a reference": (["golden", GOLDEN, "--dtype", "int4"], "bfloat16, float16, fp8"),
    "unknown dtype of a frame": (["bench", "frame", "--dtype", "int4"], "'fp8', got 'int4'"),
    "unknown dtype of a bubble": (["bench", "bubble", "--dtype", "int4"], "bfloat16, float16, fp8"),
    "unknown dtype of streams": (["bench", "throughput", "--dtype", "int4"], "bfloat16, float16, fp8"),
    "unknown skill": (["run", "clip.mp4", *OUTPUTS, "--query", "What is there?"], "does not support query"),
    "unknown key": (["run", "--config", "typo.yaml", *OUTPUTS], "typo.yaml:2:1: unknown key 'detct'; did you mean"),
    "unknown flag": (["run", "clip.mp4", "--detct", "person"], "--detct"),
    "unknown command": (["rnu"], "Did you mean 'run'?"),
    "source overwritten": (["run", "clip.mp4", *PERSON, "--out", "./clip.mp4"], "is also the source; choose"),
    "outputs the same": (["run", "clip.mp4", *PERSON, "--out", "a.mp4", "--jsonl", "a.mp4"], "same file"),
    "video as an image": (["image", "clip.mp4", *PERSON], "more than one image"),
    "nothing asked": (["run", "clip.mp4", "--out", "out.mp4"], "no prompts"),
    "no source": (["run", *OUTPUTS], "source is missing"),
    "no display": (["run", "clip.mp4", *OUTPUTS, "--display"], "no display"),
    "wrong number": (["run", "clip.mp4", *OUTPUTS, "--conf", "7"], "--conf"),
    "no number": (["run", "clip.mp4", *OUTPUTS, "--conf", "high"], "--conf"),
    "wrong size": (["bench", "frame", "--size", "big"], "640x360"),
    "no golden folder": (["golden", "none"], "none is not a folder"),
    "another folder as a golden one": (["golden", "."], ". has no config.json; give a folder with"),
    "live source as an image": (
        ["image", "http://me:secret@127.0.0.1:1/a.jpg", *PERSON],
        "127.0.0.1:1/a.jpg is a live",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, make_clip: MakeClip) -> Path:
    make_clip("clip.mp4", frames=3)
    make_clip("sound.mp4", frames=10, audio="aac", video=False)
    (tmp_path / "text.mp4").write_text("This is a letter, not a film.\n" * 40)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "broken.yaml").write_text("source: clip.mp4\ndetect: [person\n")
    (tmp_path / "typo.yaml").write_text("source: clip.mp4\ndetct: [person]\n")
    Image.new("RGB", (64, 48), "white").save(tmp_path / "photo.png")
    return tmp_path


def assert_one_line(code: int, stdout: str, stderr: str, message: str) -> None:
    assert code == 2
    assert stdout == ""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("saccade: ")
    assert message in lines[0]


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing_behind(case: str, folder: Path, saccade: Command) -> None:
    arguments, message = BAD_INPUT[case]
    before = files_in(folder)
    done = saccade(*arguments, cwd=folder)
    assert_one_line(done.returncode, done.stdout, done.stderr, message)
    assert files_in(folder) == before


def test_a_process_of_its_own_ends_with_one_line_as_well(folder: Path) -> None:
    arguments, message = BAD_INPUT["unknown class"]
    before = files_in(folder)
    done = run_saccade(*arguments, cwd=folder, fresh=True)
    assert_one_line(done.returncode, done.stdout, done.stderr, message)
    assert files_in(folder) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_whole_files(tmp_path: Path, number: signal.Signals) -> None:
    out, jsonl = tmp_path / "out.mp4", tmp_path / "out.jsonl"
    arguments = ["run", CLIP, "--detect", "person", "--out", out, "--jsonl", jsonl]
    running = start_saccade(*arguments, start_new_session=True)
    try:
        deadline = time.monotonic() + LONG_S
        while not jsonl.exists() or jsonl.read_bytes().count(b"\n") < 10:
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.send_signal(number)
        stdout, stderr = running.communicate(timeout=LONG_S)
    finally:
        running.kill()
    assert running.returncode == (0 if number == signal.SIGTERM else 130)
    assert stderr == ""
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert 10 <= len(records) < 200
    assert [record["frame"] for record in records] == list(range(len(records)))
    assert stdout.startswith(f"{len(records)} frames in ")
    with av.open(str(out)) as container:
        assert sum(1 for _ in container.decode(video=0)) == len(records)


def test_an_image_is_annotated_and_described(folder: Path, saccade: Command) -> None:
    done = saccade("image", "photo.png", "--detect", "person", "--out", "found.png", "--json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert (record["schema"], record["width"], record["height"]) == ("saccade/2", 64, 48)
    with Image.open(folder / "found.png") as annotated:
        assert annotated.size == (64, 48)


def test_a_photo_with_damaged_notes_is_read_without_a_word(folder: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(file, "JPEG")
    notes = b"Exif\0\0II*\0\x08\0\0\0" + b"\xff" * 30
    head = b"\xff\xe1" + (len(notes) + 2).to_bytes(2, "big") + notes
    (folder / "photo.jpg").write_bytes(file.getvalue()[:2] + head + file.getvalue()[2:])
    done = run_saccade("image", "photo.jpg", "--detect", "person", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing found\n", "")


@pytest.mark.parametrize("name", ["still", "still.mp4", "still.gif"])
def test_a_still_is_taken_whatever_its_name(folder: Path, saccade: Command, name: str) -> None:
    (folder / name).write_bytes((folder / "photo.png").read_bytes())
    done = saccade("image", name, "--detect", "person", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["moving.gif", "moving.jpg"])
def test_several_images_are_for_run(folder: Path, saccade: Command, name: str) -> None:
    first, *others = (Image.new("RGB", (64, 48), color) for color in ("red", "lime", "blue"))
    first.save(folder / name, "GIF", save_all=True, append_images=others, duration=100)
    refused = saccade("image", name, "--detect", "person", cwd=folder)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"saccade: {name} has more than one image; use `saccade run` for videos\n"
    done = saccade("run", name, "--detect", "person", "--jsonl", "-", "-q", cwd=folder)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["captured_at"] for record in records] == [0, 0.1, 0.2]


def test_choices_are_asked_for_on_the_command_line_and_in_yaml(folder: Path, saccade: Command) -> None:
    write_model(folder / "talker", TINY, random_model(TINY))
    done = saccade("image", "photo.png", "--query", "Is it? [yes|no]", "--model", "talker", "--json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    (answer,) = json.loads(done.stdout)["answers"]
    shares = answer["probabilities"]
    assert answer["prompt"] == "Is it?"
    assert (answer["text"], sorted(shares)) == (max(shares, key=shares.get), ["no", "yes"])
    assert sum(shares.values()) == pytest.approx(1.0, abs=2e-4)
    lines = [
        "source: photo.png",
        "model: talker",
        "jsonl: '-'",
        "query:",
        "  - Is it? [yes|no]",
        "  - Why? [reasoning]",
    ]
    (folder / "ask.yaml").write_text("\n".join(lines))
    done = saccade("run", "--config", "ask.yaml", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    same, reasoned = json.loads(done.stdout)["answers"]
    assert same == answer
    assert (reasoned["prompt"], bool(reasoned["reasoning"]["text"])) == ("Why?", True)
    done = saccade("image", "photo.png", "--query", "Is it? [yes|no]", "--model", "talker", cwd=folder)
    assert f"Is it?: {answer['text']}  ({answer['text']} " in done.stdout


def test_records_can_be_printed_with_nothing_between_them(folder: Path, saccade: Command) -> None:
    done = saccade("run", "clip.mp4", "--classes", "person,car", "--jsonl", "-", cwd=folder)
    assert done.returncode == 0
    assert [json.loads(line)["frame"] for line in done.stdout.splitlines()] == [0, 1, 2]


def test_a_config_with_flags_over_it(folder: Path, saccade: Command) -> None:
    (folder / "run.yaml").write_text("source: none.mp4\ndetect: [person]\njsonl: out.jsonl\n")
    done = saccade("run", "clip.mp4", "--config", "run.yaml", "--vid-stride", "2", "--quiet", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [json.loads(line)["frame"] for line in (folder / "out.jsonl").read_text().splitlines()] == [0, 2]


def test_the_doctor_finds_nothing_missing_here(tmp_path: Path, saccade: Command) -> None:
    done = saccade("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "all required components work" in done.stdout
    for what in ("python", "torch", "device", "decode h264", "encode libx264", "screen", "model nano"):
        assert what in done.stdout


def test_the_models_are_listed(tmp_path: Path, saccade: Command) -> None:
    done = saccade("models", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nano" in done.stdout


def test_configs_are_listed_and_printed(tmp_path: Path, saccade: Command) -> None:
    listed = saccade("configs", cwd=tmp_path)
    shipped = sorted(path.stem for path in (REPO / "configs").glob("*.yaml"))
    assert [line.split()[0] for line in listed.stdout.splitlines()] == shipped
    printed = saccade("configs", "file", cwd=tmp_path)
    (tmp_path / "file.yaml").write_text(printed.stdout)
    assert load(tmp_path / "file.yaml", {}).source == str(DEMO_CLIP)
    unknown = saccade("configs", "none", cwd=tmp_path)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("saccade: unknown configuration 'none'; available: file, ")


def test_one_frame_is_timed(tmp_path: Path, saccade: Command) -> None:
    done = saccade("bench", "frame", "--frames", "5", "--size", "320x180", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    timed = json.loads(done.stdout)
    assert (timed["width"], timed["height"], timed["frames"]) == (320, 180, 5)
    assert 0 < timed["median_ms"] <= timed["p99_ms"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["frame", "--frames", "2"],
        ["throughput", "--streams", "1", "--seconds", "0.5"],
    ],
)
def test_benches_compute_in_the_dtype_given_and_report_it(
    arguments: list[str], tmp_path: Path, saccade: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.pipeline.bench.frame.WARM_UP", 1)  # a CPU may take a second an image so
    small = ["--size", "64x36", "--device", "cpu", "--dtype", "bfloat16", "--json"]
    done = saccade("bench", *arguments, *small, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"model": "nano", "device": "cpu", "dtype": "bfloat16"}.items() <= json.loads(done.stdout).items()


def test_a_reference_is_compared_in_another_dtype(tmp_path: Path, saccade: Command) -> None:
    case = write_golden_case(tmp_path / "golden")
    done = saccade("golden", case, "--dtype", "fp8", "--tolerance", "0.001", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    table = {line[:20].strip(): line[20:].split() for line in done.stdout.splitlines()}
    assert table["crops"][-2:] == ["0", "ok"]
    assert table["boxes"][3:5] == ["any", "at"]
    assert table["logits"][3:5] == ["0.001", "DISAGREES"]


def test_help_imports_nothing_slow(tmp_path: Path) -> None:
    slow = ("torch", "av", "cv2", "numpy", "PIL")
    code = (
        "import sys; from saccade.pipeline.cli.error_report import guarded; from saccade.pipeline.cli.main import app;"
        "guarded(lambda: app(['run', '--help'], standalone_mode=False));"
        f"print('loaded:', *(name for name in {slow} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded:"
    keys = RunConfig.model_fields.keys() - {"source", "streams"}
    assert [key for key in keys if not all(flag in done.stdout for flag in flags_of(key))] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "saccade", "configs", "manual"],
            env=environment(), cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "saccade: cannot write standard output: No space left on device\n"


def test_a_traceback_only_when_asked_for(folder: Path) -> None:
    done = run_saccade("run", "none.mp4", *OUTPUTS, cwd=folder, env={**environment(), "SACCADE_DEBUG": "1"})
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("saccade: ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("two\n  lines\n", "two lines"),
        ("cannot open rtsp://me:secret@cam/1", "cannot open rtsp://cam/1"),
        ("mqtt://token@broker and ws://a:p%40ss@b:9/x", "mqtt://broker and ws://b:9/x"),
        ("mail me@home about http://host/@me", "mail me@home about http://host/@me"),
    ],
)
def test_what_is_printed_is_one_line_without_credentials(text: str, line: str) -> None:
    assert one_line(text) == line
