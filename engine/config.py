"""The sizes of an engine, in one place. Knows no torch."""

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
        drafted_tokens: of a prefill, prompts and drafts together, up to which it is drafted: so many cost next to
            nothing beside its images.
        adapter_slots: most adapters in use at the same moment.
        adapter_rank: largest rank of an adapter.
        drafts: begin the answers about a stream's frame with those about the one before it, and those about any image
            with what a detector has found in it, see `core.speculative`. In float32 the answers are those without;
            in half precision and FP8 a prefill rounds otherwise than a decode step, so that where two values are as
            likely but for a rounding, either may come out, as it may of a batch of another size.
        exact: on a CPU, a model whose tower is a detector computes all in the model's dtype, and sees what Pillow's
            resize gives; else detector and prefixes in bfloat16 where the CPU has products of it, and torch resizes:
            faster, at no cost in AP.

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
    drafted_tokens: int = 128
    adapter_slots: int = 4
    adapter_rank: int = 32
    drafts: bool = True
    exact: bool = True

    def __post_init__(self) -> None:
        if self.depth not in (1, 2):
            raise ValueError(f"depth is 1 or 2; got {self.depth!r}")
        least = {"max_sequences": 1, "page_size": 1, "images_per_prefill": 1, "adapter_slots": 0, "adapter_rank": 1}
        least["drafted_tokens"] = 0
        for name, lowest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} is a whole number of {lowest} or more; got {value!r}")
        if self.images_per_prefill > MAX_IMAGES_PER_PREFILL:
            raise ValueError(f"images_per_prefill is at most {MAX_IMAGES_PER_PREFILL}; got {self.images_per_prefill}")
        if self.kv_dtype not in (None, "fp8"):
            raise EngineError(f"unknown kv_dtype '{self.kv_dtype}': give fp8, or leave it out")
        if self.n_pages is not None and (not isinstance(self.n_pages, int) or self.n_pages < 2):
            raise ValueError(f"n_pages is a whole number of 2 or more, or None; got {self.n_pages!r}")
