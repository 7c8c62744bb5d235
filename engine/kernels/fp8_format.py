"""The FP8 format of weights, activations, keys and values: e4m3, a sign, four bits of exponent, three of fraction."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # that e4m3 holds
LEAST_KV_SCALE = 2.0**-14  # the least normal float16


def supports_fp8(device: torch.device) -> bool:
    """Whether a GPU has FP8 numbers: from Ada on. Others compute with the same weights in half precision."""
    return torch.cuda.get_device_capability(device) >= (8, 9)
