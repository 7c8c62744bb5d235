"""Configuration of an engine: sizes and all tuning parameters."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.engine.errors import EngineError

MAX_IMAGES_PER_PREFILL = 64
"""Upper limit of `images_per_prefill`; each size needs a CUDA graph and memory."""
MAX_PROMPT_TOKENS = 512
"""Maximum prompt tokens of a prefill that fit the buffers; longer prompts cannot contain values."""


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """Configuration of an engine. The defaults suit Moondream 2 on one GPU, and nano anywhere.

    Attributes:
        depth: step slots: 2 launches a step before the previous step is read, 1 does not; answers are equal.
        max_sequences: maximum number of prompts in flight.
        page_size: tokens per KV cache page.
        n_pages: KV cache pages; None fits the device.
        kv_dtype: 'fp8' stores the KV cache in FP8 (Ada or later), which doubles the pages; None uses the model's dtype.
        images_per_prefill: most images per prefill, 1 to 64; 1 on a CPU. `Engine.load` sets 16 for nano on CUDA.
        adapter_slots: maximum number of LoRA adapters in use at the same time.
        adapter_rank: maximum rank of an adapter.
        drafts: speculative decoding with drafts from the stream's previous frame or from detections, see
            `core.speculative`. Answers are unchanged in float32. In half precision and FP8, near-ties may resolve
            differently, as with another batch size.
        exact: on a CPU with a detector model, compute everything in the model's dtype and resize like Pillow. Otherwise
            detector and prefixes use bfloat16 if supported, and torch resizes, which is faster at equal AP.
        decodes_quiet, decodes_busy: decode steps between two prefills, with fewer queued images than a prefill takes
            and with a full prefill queued; see `core.scheduler`.
        prefill_ready: fraction of admitted images that must be prepared before a prefill starts while sequences decode.
        most_credit: maximum saved credit of a stream of weight 1, see `core.admission`; larger values allow bursts.
        owed_credit: streams with at least this credit come first.
        fresh_s: older frames yield their turn; the default is the time of a prefill of 8 images on an H200.
        service_doubt: factor for the estimated service time after each frame that it ended.
        passing_streams: number of idle streams without settings that are remembered.
        lead_prefills: number of recent prefills per size whose minimum duration counts.
        lead_late: factor for the duration of a prefill that was read late.
        follow_decodes: with fewer decode steps between two prefills, the next prefill is launched ahead.
        poll_s: polling interval in seconds for devices without completion callbacks.
        preparers: threads that copy images for upload to a GPU; one copies 4K frames at 6 ms each.
        crop_large, crop_bound, crop_doubt: minimum pixels for measuring cropping time; fraction used as lower bound;
            factor for the bound after each rejection.
        drafted_tokens: maximum prompt and draft tokens of a prefill with drafts; this number costs almost nothing next
            to the images.
        image_draft: values of an image's draft in a prefill (two boxes) if the last answer was not longer.
        draft_misses: consecutive steps that correct only one value, before decoding continues without drafts.
        draft_worth: fraction of an answer's steps that drafts must save; each draft costs about 0.2 ms of GPU time.
        draft_pause: maximum number of answers without drafts after failed drafts.
        remembered_prompts: maximum number of prompts per stream with stored drafts.
        known_tasks: maximum number of tasks with cached labels and token IDs.
        refiner: file or hub ID of an outline refiner, or None.

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
    follow_decodes: float = 0.5
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
            raise ValueError(f"depth must be 1 or 2; got {self.depth!r}")
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
            raise ValueError(f"refiner must be a path, a hub ID or None; got {self.refiner!r}")
        if self.kv_dtype not in (None, "fp8"):
            raise EngineError(f"unknown kv_dtype '{self.kv_dtype}'; use fp8 or omit it")
        if self.n_pages is not None and (not isinstance(self.n_pages, int) or self.n_pages < 2):
            raise ValueError(f"n_pages must be an integer of at least 2, or None; got {self.n_pages!r}")


_DEFAULTS = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
_WHOLE = {name: value for name, value in _DEFAULTS.items() if type(value) is int}
_NUMBERS = [name for name, value in _DEFAULTS.items() if type(value) is float]
