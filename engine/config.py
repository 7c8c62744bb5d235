"""The sizes of an engine, and every number that tunes it, in one place. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.engine.errors import EngineError

MAX_IMAGES_PER_PREFILL = 64
"""Each size is a CUDA graph more, and memory of its own."""
MAX_PROMPT_TOKENS = 512
"""Tokens of a prefill's prompts that buffers are made for: no values are fed behind more."""


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """Sizes of an engine. The defaults suit Moondream 2 on one GPU, and nano anywhere.

    Attributes:
        depth: step slots: 2 launches a step before the one ahead of it is read, 1 does not; the answers are the same.
        max_sequences: most prompts being answered at a time.
        page_size: tokens of a page of the KV cache.
        n_pages: pages of the KV cache; None for what fits the device.
        kv_dtype: 'fp8' keeps keys and values in FP8, on a GPU from Ada on: half the bytes, and so twice the pages; None
            keeps them as the model computes.
        images_per_prefill: most images in one prefill, 1 to 64; a CPU takes one at a time.
        adapter_slots: most adapters in use at the same moment.
        adapter_rank: largest rank of an adapter.
        drafts: begin the answers about a stream's frame with those about the one before it, and those about any image
            with what a detector has found in it, see `core.speculative`. In float32 the answers are those without;
            in half precision and FP8 a prefill rounds otherwise than a decode step, and near-ties may resolve
            differently, as they may in a batch of another size.
        exact: on a CPU, a model whose tower is a detector computes all in the model's dtype, and sees what Pillow's
            resize gives; else detector and prefixes in bfloat16 where the CPU has products of it, and torch resizes:
            faster, at no cost in AP.
        decodes_quiet, decodes_busy: decode steps between two prefills, see `core.scheduler`: while fewer images wait
            than one prefill takes; while so many wait.
        prefill_ready: share of the admitted images that must be prepared before a prefill begins while others decode.
        most_credit: parts that a stream of weight 1 may save up, see `core.admission`; with 1 it loses its turn where
            it has no fresh frame at the wrong moment, more allows bursts.
        owed_credit: a stream with so much comes before others: one for the next turn, and one that it has not used.
        fresh_s: a frame that is older leaves its turn to others: a prefill of 8 images on an H200.
        service_doubt: factor of the time that an answer is expected to take, after each frame that ended for it.
        passing_streams: streams without settings that are remembered though nothing of them waits or runs.
        lead_prefills: prefills of a size of which the shortest tells when the next images are admitted.
        lead_late: factor of a prefill's duration that was read late, so that the next images are admitted earlier.
        follow_decodes: with fewer decode steps between two prefills, the next one is launched ahead.
        poll_s: how often a device that calls nobody is asked for its step, while the loop waits for something else too.
        preparers: threads that copy images for the upload to a GPU: one copies 4K frames at 6 ms each.
        crop_large, crop_bound, crop_doubt: pixels from which on cutting an image is measured; the share of what was
            measured that is a lower bound for others; factor of the bound after each refusal.
        drafted_tokens: of a prefill, prompts and drafts together, up to which it is drafted: so many cost next to
            nothing beside its images.
        image_draft: values that a prefill takes of an image's draft, two boxes, where the last answer was no longer.
        draft_misses: steps in a row that only correct one value, before the rest is written plainly.
        draft_worth: share of an answer's steps that drafts must save: each costs some 0.2 ms more of a GPU.
        draft_pause: most answers for which a prompt whose drafts fail goes without.
        remembered_prompts: of a stream.
        known_tasks: tasks whose names and token ids are remembered.
        refiner: file, or hub id, of a refiner that redraws outlines; None for outlines as the model writes them.

    Raises:
        ValueError: if one of them is out of its range.
        EngineError: if there is no such `kv_dtype`: users give it, as they give a dtype.
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
            raise ValueError(f"depth is 1 or 2; got {self.depth!r}")
        may_be_0 = {"adapter_slots", "drafted_tokens", "decodes_quiet", "decodes_busy", "image_draft"}
        for name, default in _WHOLE.items():
            value, lowest = getattr(self, name), 0 if name in may_be_0 else 1
            if not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} is a whole number of {lowest} or more (by default {default}); got {value!r}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name} is a number above 0; got {value!r}")
        if self.images_per_prefill > MAX_IMAGES_PER_PREFILL:
            raise ValueError(f"images_per_prefill is at most {MAX_IMAGES_PER_PREFILL}; got {self.images_per_prefill}")
        if not isinstance(self.refiner, str | None):
            raise ValueError(f"refiner is a path or a hub id, or None; got {self.refiner!r}")
        if self.kv_dtype not in (None, "fp8"):
            raise EngineError(f"unknown kv_dtype '{self.kv_dtype}': give fp8, or leave it out")
        if self.n_pages is not None and (not isinstance(self.n_pages, int) or self.n_pages < 2):
            raise ValueError(f"n_pages is a whole number of 2 or more, or None; got {self.n_pages!r}")


_DEFAULTS = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
_WHOLE = {name: value for name, value in _DEFAULTS.items() if type(value) is int}
_NUMBERS = [name for name, value in _DEFAULTS.items() if type(value) is float]
