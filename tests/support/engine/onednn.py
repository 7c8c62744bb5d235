"""What a CPU and its torch must have for tests of fused layers."""

from __future__ import annotations

import pytest
import torch

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no products of bfloat16: they need AVX-512")
