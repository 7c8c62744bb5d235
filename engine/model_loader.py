"""Loads a model by name, device and dtype, and creates the executor and step loop of the engine."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.admission import PagePool
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.cpu.threads import one_thread
from saccade.engine.cuda.paged_cache import pages_for
from saccade.engine.errors import EngineError
from saccade.engine.kernels import supports_fp8
from saccade.engine.models import model_files, registry
from saccade.engine.models.protocol import DraftingEncoder, LoadedModel, Model, SizedEncoder
from saccade.engine.models.quantization import round_to_fp8
from saccade.engine.process import keep_freed_memory, silence_tracer
from saccade.engine.runtime.cpu_executor import CpuExecutor
from saccade.engine.runtime.executor import Executor
from saccade.engine.runtime.graph_capture import Progress
from saccade.engine.runtime.loop import StepLoop
from saccade.engine.tasks import TASKS
from saccade.engine.tasks.task import Vocabulary

FP8 = "fp8"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, FP8: torch.bfloat16}
"""Compute dtype by name; 'fp8' also rounds block weights to FP8, see `quantization`."""


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """Description of a loaded model.

    Attributes:
        name: name of the model.
        folder: folder with the model's files.
        parameters: number of weights.
        classes: classes of a closed vocabulary, or None.
        skills: names of the supported tasks.
        device: device of the model.
        dtype: name of the dtype, as given to `load` or from the model. For nano on a CPU with bfloat16 instructions, it
            is 'float32 with bfloat16 products'.
        fallbacks: messages about features that use a slower implementation on this device.
        reasons: whether the model can reason before it answers a question.
    """

    name: str
    folder: Path
    parameters: int
    classes: tuple[str, ...] | None
    skills: tuple[str, ...]
    device: str
    dtype: str
    fallbacks: tuple[str, ...] = ()
    reasons: bool = False

    @property
    def gpu(self) -> int | None:
        """Index of the GPU, or None on a CPU."""
        device = torch.device(self.device)
        return device.index or 0 if device.type == "cuda" else None

    @classmethod
    def of(cls, loaded: LoadedModel, name: str, folder: Path, dtype: str | None) -> ModelInfo:
        """Return the description of a loaded model. `dtype` is the requested name or None."""
        model = loaded.model
        return cls(
            name=name,
            folder=folder,
            parameters=model.n_parameters(),
            classes=loaded.classes,
            skills=tuple(skill for skill in TASKS if loaded.prompts.can(skill)),
            device=str(model.device),
            dtype=dtype or str(model.dtype).removeprefix("torch."),
            reasons=loaded.prompts.can("query") and loaded.prompts.reasoning is not None,
        )


def open_model(
    name: str, device: str, dtype: str | None, imgsz: int | None = None
) -> tuple[LoadedModel, ModelInfo, Vocabulary | None]:
    """Load a model by name. Return the model, its description, and its class names if it has a closed vocabulary.

    Raises:
        EngineError: if the model, device or dtype does not exist, or the model does not fit into the memory.
    """
    folder = model_files.find(name)
    place = choose_device(device)
    small = model_files.weights_bytes(folder) < 200 << 20
    default = torch.float32 if place.type == "cpu" else torch.float16 if small else torch.bfloat16
    try:
        with one_thread() if place.type == "cpu" else nullcontext():
            loaded = load_folder(folder, place, dtype, default)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"{name} does not fit into the memory of {place}; use a smaller model or another device"
        ) from error
    if imgsz is not None:
        if not isinstance(loaded.model.vision, SizedEncoder):
            raise EngineError(f"{name} has a fixed image size: remove imgsz, which only the model nano supports")
        loaded.model.vision.set_crop_size(imgsz)
    vocabulary = None if loaded.classes is None else Vocabulary(name, loaded.classes, loaded.synonyms)
    return loaded, ModelInfo.of(loaded, name, folder, dtype), vocabulary


def load_folder(folder: Path, place: torch.device, dtype: str | None, default: torch.dtype) -> LoadedModel:
    """Load a model from a folder.

    Args:
        folder: the model folder.
        place: device of the weights.
        dtype: name of the compute dtype, or None to use `default`.
        default: default compute dtype.

    Raises:
        EngineError: if the dtype is unknown.
        ModelFilesError: if the files cannot be read or are inconsistent.
    """
    loaded = registry.load(folder, place, choose_dtype(dtype, default))
    if dtype == FP8:
        round_to_fp8(loaded.model)
    return loaded


def choose_device(name: str) -> torch.device:
    """Return the device for 'auto', 'cpu', 'cuda' or 'cuda:N'.

    Raises:
        EngineError: if the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"unknown device '{name}': use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"unknown device '{name}': use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"device '{name}' does not exist on this machine; use cpu or auto")
    return device


def choose_dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    """Return the compute dtype with a name from `DTYPES`, or `default` if the name is None.

    Raises:
        EngineError: if the dtype is unknown.
    """
    if name is None:
        return default
    if name not in DTYPES:
        raise EngineError(f"unknown dtype '{name}': give one of {', '.join(DTYPES)}")
    return DTYPES[name]


def start(
    model: Model, config: EngineConfig, *, texts: bool, progress: Progress | None = None
) -> tuple[Executor[Any], StepLoop[Any]]:
    """Create the executor of a model, allocate its memory, and start its step loop.

    Args:
        model: the model on its device.
        config: engine configuration.
        texts: whether the model supports text tasks.
        progress: callback that reports the progress while a GPU is prepared.

    Raises:
        EngineError: if the device does not support the configured `kv_dtype`.
    """
    if config.kv_dtype is not None and not (model.device.type == "cuda" and supports_fp8(model.device)):
        raise EngineError(
            f"kv_dtype {config.kv_dtype} needs an NVIDIA GPU of generation Ada or later; omit it on {model.device}"
        )
    n_pages = config.n_pages or pages_for(model, config.page_size, config.max_sequences, config.kv_dtype)
    executor: Executor[Any]
    if model.device.type == "cuda":
        from saccade.engine.runtime.cuda_executor import CudaExecutor

        executor = CudaExecutor(model, config, n_pages, texts=texts, progress=progress)
        torch.cuda.empty_cache()  # free the memory of weights before packing
        preparers = config.preparers
    else:
        keep_freed_memory()
        silence_tracer()
        config, preparers = replace(config, images_per_prefill=1), 1  # on a CPU, batches of images are not faster
        executor = CpuExecutor(model, config, n_pages, texts=texts)
    from_images = config.drafts and isinstance(model.vision, DraftingEncoder)
    return executor, step_loop(executor, model, config, n_pages, preparers, from_images=from_images)


def step_loop(
    executor: Executor[Any], model: Model, config: EngineConfig, n_pages: int, preparers: int, *, from_images: bool
) -> StepLoop[Any]:
    """Create the scheduler and start the step loop for an executor.

    Args:
        executor: the executor.
        model: model of the executor.
        config: engine configuration, with the same `images_per_prefill` as that of the executor.
        n_pages: number of KV cache pages.
        preparers: number of threads that prepare images.
        from_images: whether to use the vision encoder's detections as drafts (speculative decoding).
    """
    pool = PagePool(n_pages)
    pool.allocate(1)  # page 0 is for padding rows, see `Executor`
    scheduler: Scheduler[Any] = Scheduler(config, pool, model.limits.prefix_length, from_images=from_images)
    loop = StepLoop(executor, scheduler, config, preparers)
    loop.monitor.attach(executor.streams)
    loop.start()
    return loop
