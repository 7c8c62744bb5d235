"""Attention between the tokens of each image on CUDA.

A Gluon kernel computes the attention if it runs and matches PyTorch on this GPU. Otherwise PyTorch computes it.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch.nn import functional as F

from saccade.engine.errors import Fallbacks

_LIMIT = 0.01  # maximum relative error of a correct result; 0.003 in bf16


class ImageAttention:
    """Bidirectional attention between the tokens of each image.

    Create an instance before CUDA graph capture, because the constructor tests the Gluon kernel.

    Args:
        device, dtype: device and dtype of the heads.
        n_heads, n_kv_heads: number of query heads, and number of key and value heads.
        head_dim: width of a head.
        tokens: number of tokens per image.
        fallbacks: collects a message if the Gluon kernel does not run.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        tokens: int,
        fallbacks: Fallbacks,
    ) -> None:
        self._heads, self._dim, self._tokens = [n_heads, n_kv_heads, n_kv_heads], head_dim, tokens
        self._kernel: ModuleType | None = None
        if on_hopper(device):
            self._kernel, wrong = _tried(device, dtype, n_heads, n_kv_heads, head_dim, tokens)
            if wrong is not None:
                fallbacks.note(f"images are slower, because the attention kernel does not run on this GPU: {wrong}")

    def attend(self, heads: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention output (images · tokens, n_heads · head_dim).

        Args:
            heads: (images · tokens, (n_heads + 2 n_kv_heads) · head_dim): queries, keys and values.
            out: buffer for the result of the Gluon kernel, or None. PyTorch allocates its own result.

        Returns:
            The result, in `out` or in a new tensor.
        """
        n_heads, n_kv_heads, _ = self._heads
        if self._kernel is not None and self._kernel.aligned(heads):
            out = heads.new_empty(len(heads), n_heads * self._dim) if out is None else out
            self._kernel.image_attention(heads, out, len(heads) // self._tokens, n_heads, n_kv_heads)
            return out
        return _attend(heads, self._heads, self._dim, self._tokens)


def on_hopper(device: torch.device) -> bool:
    """Return whether the GPU supports the instructions of the Gluon kernel (wgmma): compute capability 9.0 only."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _attend(heads: torch.Tensor, parts: list[int], dim: int, tokens: int) -> torch.Tensor:
    every = heads.unflatten(0, (-1, tokens)).unflatten(2, (-1, dim)).transpose(1, 2)
    q, k, v = every.split(parts, dim=1)
    seen = F.scaled_dot_product_attention(q, k, v, enable_gqa=parts[0] != parts[1])
    return seen.transpose(1, 2).reshape(len(heads), -1)


@cache
def _tried(
    device: torch.device, dtype: torch.dtype, n_heads: int, n_kv_heads: int, head_dim: int, tokens: int
) -> tuple[ModuleType | None, str | None]:
    """Compile the Gluon kernel and compare its result with PyTorch.

    Return the module of the kernel or None, and the error message or None.
    """
    try:
        from saccade.engine.kernels import image_attention as kernel

        if not kernel.supports(dtype, head_dim, tokens):
            return None, None
        dice, width = torch.Generator(device).manual_seed(0), (n_heads + 2 * n_kv_heads) * head_dim
        with torch.inference_mode():
            heads = torch.randn(2 * tokens, width, device=device, dtype=dtype, generator=dice)
            wanted = _attend(heads, [n_heads, n_kv_heads, n_kv_heads], head_dim, tokens).float()
            out = torch.full_like(wanted, torch.nan, dtype=dtype)
            with torch.cuda.device_of(heads):
                kernel.image_attention(heads, out, 2, n_heads, n_kv_heads)
            far = float((out.float() - wanted).norm() / wanted.norm())
        if far < _LIMIT:
            return kernel, None
    except Exception as error:  # Gluon is experimental and raises different errors in each version of Triton
        # Triton's message has the source first and the reason last.
        return None, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
    return None, f"relative error {far:.2g} is too large"
