"""The command `saccade doctor`: checks that all components for a run are installed.

It does not change or download files.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from saccade.pipeline.cli.requirements import Dependency, dependencies
from saccade.processors import usable_processors

if TYPE_CHECKING:
    from saccade.engine.models.protocol import LoadedModel

DECODERS = {"h264": True, "hevc": True, "vp8": True, "vp9": True, "av1": False, "mjpeg": True}
ENCODERS = {"libx264": True, "h264_nvenc": False}
"""For each encoder, whether it is required for a run."""
_COVERED = 0.4  # lowest mean IoU at which boxes count as correct


@dataclass(slots=True, frozen=True)
class Finding:
    """The result of one check of the installation.

    Attributes:
        what: name of the checked component.
        ok: whether the component is installed and works.
        needed: whether the component is required for a run.
        detail: version or device of the component, or the reason of the failure, in one line.
    """

    what: str
    ok: bool
    needed: bool
    detail: str


def examine() -> Iterator[Finding]:
    """Run all checks of the installation, one after another. Slow checks come last."""
    yield Finding("python", sys.version_info >= (3, 11), True, f"{platform.python_version()} on {platform.platform()}")
    for one in dependencies():
        yield _try(one.requirement.name, not one.extra, _installed, one)
    yield _try("device", True, _device)
    for codec, needed in DECODERS.items():
        yield _try(f"decode {codec}", needed, _codec, codec)
    yield _try("decode on the GPU", False, _decoding)
    for codec, needed in ENCODERS.items():
        yield _try(f"encode {codec}", needed, _encoding, codec)
    yield _screen()
    yield _try("model nano", True, _nano)


def examine_gpu() -> Iterator[Finding]:
    """Check every GPU: compare the results of the model `nano` with its results on the CPU. Takes a minute per GPU."""
    import torch

    if not torch.cuda.is_available():
        yield Finding(
            "gpu", False, True, "torch finds no CUDA device: check the driver, and install a CUDA build of torch"
        )
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        yield _try(device, True, _gpu, device)
        yield _try(f"{device} kernels", False, _kernels, device)
        for dtype in ("float32", "bfloat16", "float16"):
            yield _try(f"{device} {dtype}", True, agreement, device, dtype)


def examine_model(name: str, refiner: str | None = None) -> Iterator[Finding]:
    """Check a model file: load the model, and detect people in the demo clip.

    The detection runs once for each input normalization that the coordinate heads can have. The result shows which
    normalization is correct. In the checkpoint's config.json, the key `reads` selects it.

    Args:
        name: name of the model.
        refiner: file or Hugging Face Hub ID of a mask refiner for the model.
    """
    from saccade.engine import Engine
    from saccade.engine.golden.region_readings import compare_readings
    from saccade.engine.model_loader import open_model
    from saccade.pipeline.asset_files import DEMO_CLIP
    from saccade.pipeline.bench.common import images_of

    try:
        loaded, info, _ = open_model(name, "auto", None)
        image = images_of(str(DEMO_CLIP), 640, 360)[0]
        with Engine.load("nano", "cpu") as engine:
            people = engine.detect(image, "person").boxes
        readings = compare_readings(loaded, image, "person", people)
    except Exception as error:  # any error is a finding
        yield Finding(f"model {name}", False, True, " ".join(f"{error or type(error).__name__}".split()))
        return
    yield Finding("model", True, True, f"{info.parameters / 1e9:.2f} B parameters, {info.dtype} on {info.device}")
    if loaded.family:
        yield Finding("model file", True, True, loaded.family)
    if refiner is not None:
        yield _try("refiner", True, _refiner, loaded, refiner)
    for number, one in enumerate(readings):
        what = f"{one.found} boxes; the {len(people)} people in the demo clip are covered by {one.overlap:.2f}"
        usual = " (as loaded)" if number == 0 else ""
        yield Finding(f"reads {one.name}", one.overlap >= _COVERED, False, what + usual)
    if readings:
        best = max(readings, key=lambda one: one.overlap)
        advice = f'"reads": "{best.name}" in the region section of config.json fits the weights'
        if best.overlap < _COVERED:
            advice = "no variant detects the people: check that the weights are trained"
        yield Finding("region heads", best.overlap >= _COVERED and best is readings[0], False, advice)


def _refiner(loaded: LoadedModel, name: str) -> str:
    """Check that a mask refiner is compatible with a model. Return a description in one line."""
    from saccade.engine.models.model_files import find_refiner

    if loaded.load_refiner is None:
        raise ValueError("this model does not support a mask refiner; use Moondream 3")
    path = find_refiner(name)
    loaded.load_refiner(path)
    return f"{path} fits the model's vision encoder"


def report(gpu: bool, model: str | None, refiner: str | None = None) -> bool:
    """Print the results of all checks. Return whether a required component failed.

    Args:
        gpu: whether to check every GPU.
        model: model to check, see `examine_model`.
        refiner: mask refiner to check, see `examine_model`.
    """
    console = Console(soft_wrap=True, highlight=False)
    broken = []
    for finding in chain(examine(), examine_gpu() if gpu else (), examine_model(model, refiner) if model else ()):
        mark = "[green]ok     [/]" if finding.ok else "[red]BROKEN [/]" if finding.needed else "[yellow]missing[/]"
        console.print(f"{mark} {finding.what:<18} {escape(finding.detail)}")
        if finding.needed and not finding.ok:
            broken.append(finding.what)
    console.print(
        f"[red]required components that failed: {', '.join(broken)}[/]" if broken else "all required components work"
    )
    return bool(broken)


def _gpu(device: str) -> str:
    import torch

    found = torch.cuda.get_device_properties(device)
    build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    return (
        f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}; {build}"
    )


def _kernels(device: str) -> str:
    import torch

    from saccade.engine import kernels

    if not kernels.available(torch.device(device)):
        raise RuntimeError(
            "slower PyTorch code replaces the Triton kernels, which need a GPU of compute capability 8.0 or higher"
        )
    return "Triton compiles them"


def agreement(device: str, dtype: str) -> str:
    """Compare the results of the model `nano` on a device with its results on the CPU. Return a summary in one line.

    Raises:
        RuntimeError: if the results differ in float32. In other dtypes, they can differ.
    """
    from saccade.engine.golden.self_check import compare_devices

    found = compare_devices(device, dtype)
    detail = f"{found.compared - found.differing} of {found.compared} answers match those of the CPU"
    if dtype == "float32" and not found.ok:
        raise RuntimeError(
            f"only {detail}; coordinates differ from those of the CPU by up to {found.largest:.1%} of the image size"
        )
    return detail


def _try(what: str, needed: bool, check: Callable[..., str], *args: object) -> Finding:
    try:
        return Finding(what, True, needed, check(*args))
    except Exception as error:  # any error of an import or a driver is a finding
        return Finding(what, False, needed, " ".join(f"{error or type(error).__name__}".split()))


def _installed(one: Dependency) -> str:
    try:
        return one.check()
    except ModuleNotFoundError as error:
        remedy = f"; {one.remedy}" if one.remedy else ""
        raise RuntimeError(f"{error}{remedy}") from None


def _device() -> str:
    import torch

    threads = f"{torch.get_num_threads()} threads on {usable_processors()} processors"
    if not torch.cuda.is_available():
        return f"cpu, {threads}"
    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return f"cuda: {gpus}; cpu: {threads}"


def _codec(name: str) -> str:
    import av

    return av.Codec(name, "r").long_name


def _encoding(name: str) -> str:
    import av
    import av.error

    from saccade.sinks.video.encoder import try_encoder

    try:
        try_encoder(name)
    except av.error.FFmpegError as error:  # its text includes the encoder options
        raise RuntimeError(f"FFmpeg includes this encoder, but it cannot be opened: {error.strerror}") from None
    return av.Codec(name, "w").long_name


def _decoding() -> str:
    """Check video decoding on the first GPU. Return a description in one line."""
    from saccade.sources.gpu import gpu_decoding

    gpu_decoding("cuda", 0)
    return "cuda: frames stay on the GPU unless an output needs their pixels"


def _screen() -> Finding:
    there = sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return Finding("screen", there, False, "there" if there else "no display found: --display is unavailable")


def _nano() -> str:
    from saccade.engine import Engine

    with Engine.load("nano", device="cpu") as engine:
        return f"{engine.model.parameters / 1e6:.1f} M parameters; classes: {', '.join(engine.model.classes or ())}"
