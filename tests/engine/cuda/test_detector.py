"""The detector in kernels of its own against its own modules. Runs where there is a GPU: see test_cuda_executor."""

from __future__ import annotations

import pytest
import torch

from saccade.engine.models.nano.picodet import PicoDet

pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3, 64, 96), (3, 3, 416, 416)])
@torch.inference_mode()
def test_a_detector_on_cuda_says_the_same_in_its_kernels(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from saccade.engine.cuda.detector import packed

    torch.manual_seed(0)
    plain = PicoDet(5, 2).eval().cuda()
    for weight in plain.parameters():
        torch.nn.init.kaiming_normal_(weight) if weight.ndim > 1 else torch.nn.init.normal_(weight, std=0.1)
    crops = (torch.rand(shape, device="cuda") * 2 - 1).to(dtype).contiguous(memory_format=torch.channels_last)
    got, wanted = packed(plain, dtype)(crops), plain(crops.float())
    for name in ("features", "classes", "sides", "grid"):
        mine, theirs = getattr(got, name).float(), getattr(wanted, name)
        assert mine.shape == theirs.shape
        assert (mine - theirs).norm() < (0.06 if dtype is torch.bfloat16 else 0.01) * theirs.norm(), name
