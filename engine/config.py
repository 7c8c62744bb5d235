"""Configuration of an engine: sizes and all tuning parameters."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.engine.errors import EngineError

MAX_IMAGES_PER_PREFILL = 64
"""Upper limit of `images_per_prefill`. Each batch size needs a CUDA graph and memory."""
GRAPH_PROMPT_TOKENS = 512
"""Maximum number of prompt tokens of a prefill that fit the input buffers."""


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """Configuration of an engine. The defaults suit Moondream 2 on one GPU, and nano on any device.

    Attributes:
        depth: number of batch steps in flight. With 2, a step is launched before the host reads the results of the
            previous step. The answers do not depend on it.
        max_sequences: maximum number of prompts that are processed at the same time.
        page_size: number of tokens per KV cache page.
        n_pages: number of KV cache pages. None chooses the number from the free memory of the device.
        kv_dtype: 'fp8' stores the KV cache in FP8 (Ada or later GPUs), which doubles the number of pages. None uses the
            model's dtype.
        images_per_prefill: maximum number of images per prefill, from 1 to 64. A CPU always uses 1. `Engine.load` sets
            32 for nano on CUDA.
        requests_per_prefill: maximum number of requests that begin in a prefill. Further images in the prefill are
            tiles of these requests. `Engine.load` sets 16 for nano on CUDA.
        adapter_slots: maximum number of LoRA adapters in use at the same time.
        adapter_rank: maximum rank of an adapter.
        drafts: whether to use speculative decoding, see `core.speculative`. Drafts come from the previous frame of the
            stream, or from detections. In float32, answers do not change. In half precision and FP8, near-ties may
            resolve differently, as with another batch size.
        exact: only for a detector model on a CPU. If True, everything is computed in the model's dtype, and images are
            resized like Pillow does. If False, the detector and the image prefixes use bfloat16 if the CPU supports it,
            and PyTorch resizes the images. False is faster and has the same average precision.
        decodes_quiet: number of decode steps between two prefills if fewer images are queued than fit into a prefill,
            see `core.scheduler`.
        decodes_busy: number of decode steps between two prefills if enough images are queued to fill a prefill.
        prefill_ready: fraction of the admitted images that must be prepared before a prefill may interrupt decoding.
        most_credit: maximum scheduling credit of a stream with weight 1, see `core.admission`. Larger values allow
            longer bursts.
        owed_credit: streams with at least this scheduling credit are admitted before other streams.
        fresh_s: age in seconds above which a frame is admitted after newer frames of other streams. The default is the
            time of a prefill of 8 images on an H200.
        service_doubt: factor by which the estimated service time is reduced each time it causes the rejection of a
            frame.
        passing_streams: maximum number of idle streams without settings for which the engine stores scheduling state.
        lead_prefills: number of recent prefills whose shortest duration determines the admission lead
            (`AdmissionLead`).
        lead_late: factor for the measured duration of a prefill that ended before the step loop waited for it. The
            measured duration is then too long.
        poll_s: polling interval in seconds for devices without completion callbacks.
        preparers: number of threads that copy images for upload to a GPU. Copying a 4K frame takes 6 ms.
        crop_large: number of pixels below which the cropping time of an image is not measured.
        crop_bound: fraction of a measured cropping time that is used as lower bound of later cropping times.
        crop_doubt: factor by which the lower bound of the cropping time is reduced after each request that it rejects.
        drafted_tokens: maximum number of prompt and draft tokens in a prefill with drafts. The default adds almost no
            time to the encoding of the images.
        image_draft: minimum number of values in a draft from the detections in an image. The default corresponds to two
            boxes.
        draft_misses: number of consecutive steps with a wrong first draft value after which decoding continues without
            drafts.
        draft_worth: minimum fraction of an answer's decode steps that drafts must save. A draft costs about 0.2 ms of
            GPU time.
        draft_pause: maximum number of answers that are decoded without drafts after drafts saved too few steps.
        remembered_prompts: maximum number of prompts per stream for which drafts are stored.
        known_tasks: maximum number of tasks whose labels and token IDs are cached.
        refiner: file or Hugging Face Hub ID of a network that refines outlines, or None.

    Raises:
        ValueError: if a value is out of range.
        EngineError: if `kv_dtype` is unknown.
    """

    depth: int = 2
    max_sequences: int = 64
    page_size: int = 16
    n_pages: int | None = None
    kv_dtype: str | None = None
    images_per_prefill: int = 8
    requests_per_prefill: int = MAX_IMAGES_PER_PREFILL
    adapter_slots: int = 4
    adapter_rank: int = 32
    drafts: bool = True
    exact: bool = True
    decodes_quiet: int = 9
    decodes_busy: int = 3
    prefill_ready: float = 0.75
    most_credit: float = 3.0
    owed_credit: float = 2.0
    fresh_s: float = 0.05
    service_doubt: float = 0.95
    passing_streams: int = 4096
    lead_prefills: int = 16
    lead_late: float = 0.8
    poll_s: float = 1e-3
    preparers: int = 4
    crop_large: int = 1 << 18
    crop_bound: float = 0.5
    crop_doubt: float = 0.9
    drafted_tokens: int = 128
    image_draft: int = 6
    draft_misses: int = 4
    draft_worth: float = 0.25
    draft_pause: int = 64
    remembered_prompts: int = 256
    known_tasks: int = 1024
    refiner: str | None = None

    def __post_init__(self) -> None:
        if self.depth not in (1, 2):
            raise ValueError(f"depth (batch steps in flight) must be 1 or 2; got {self.depth!r}")
        may_be_0 = {"adapter_slots", "drafted_tokens", "decodes_quiet", "decodes_busy", "image_draft"}
        for name, default in _WHOLE.items():
            value, lowest = getattr(self, name), 0 if name in may_be_0 else 1
            if not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} must be an integer of at least {lowest} (default {default}); got {value!r}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a number above 0; got {value!r}")
        if self.images_per_prefill > MAX_IMAGES_PER_PREFILL:
            raise ValueError(
                f"images_per_prefill must be at most {MAX_IMAGES_PER_PREFILL}; got {self.images_per_prefill}"
            )
        if not isinstance(self.refiner, str | None):
            raise ValueError(f"refiner must be a file path, a Hugging Face Hub ID or None; got {self.refiner!r}")
        if self.kv_dtype not in (None, "fp8"):
            raise EngineError(f"unknown kv_dtype '{self.kv_dtype}'; use fp8 or omit it")
        if self.n_pages is not None and (not isinstance(self.n_pages, int) or self.n_pages < 2):
            raise ValueError(
                f"n_pages (KV cache pages) must be an integer of at least 2, or None; got {self.n_pages!r}"
            )


_DEFAULTS = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
_WHOLE = {name: value for name, value in _DEFAULTS.items() if type(value) is int}
_NUMBERS = [name for name, value in _DEFAULTS.items() if type(value) is float]
