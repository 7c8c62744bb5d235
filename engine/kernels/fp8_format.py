"""Constants of the FP8 format e4m3 (sign, 4 exponent and 3 mantissa bits) for weights, activations and KV cache."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest finite e4m3 value
LEAST_KV_SCALE = 2.0**-14  # the smallest normal float16


def supports_fp8(device: torch.device) -> bool:
    """Return whether the GPU has FP8 arithmetic (Ada or later). Other GPUs widen FP8 weights to half precision."""
    return torch.cuda.get_device_capability(device) >= (8, 9)
