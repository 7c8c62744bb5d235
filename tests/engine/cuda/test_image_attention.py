"""Which attention within images is used: our kernel where it runs and is right, else torch's. Mostly a fake kernel."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from saccade.engine import kernels
from saccade.engine.cuda import image_attention
from saccade.engine.cuda.image_attention import ImageAttention
from saccade.engine.errors import Fallbacks
from tests.support.engine.kernels import far

N_HEADS, N_KV, DIM, TOKENS = 4, 2, 8, 5
WIDTH = (N_HEADS + 2 * N_KV) * DIM
Kernel = Callable[[torch.Tensor, torch.Tensor, int, int, int], None]


def seen(heads: torch.Tensor, images: int) -> torch.Tensor:
    q, k, v = (
        part.view(images, TOKENS, -1, DIM).transpose(1, 2)
        for part in heads.split([N_HEADS * DIM, N_KV * DIM, N_KV * DIM], 1)
    )
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(len(heads), -1)


def right(heads: torch.Tensor, out: torch.Tensor, images: int, n_heads: int, n_kv_heads: int) -> None:
    out.copy_(seen(heads, images))


def wrong(heads: torch.Tensor, out: torch.Tensor, images: int, n_heads: int, n_kv_heads: int) -> None:
    right(heads, out, images, n_heads, n_kv_heads)
    out[-1] *= 1.5


def silent(heads: torch.Tensor, out: torch.Tensor, images: int, n_heads: int, n_kv_heads: int) -> None:
    """Writes nothing."""


def refused(heads: torch.Tensor, out: torch.Tensor, images: int, n_heads: int, n_kv_heads: int) -> None:
    raise AttributeError("module 'gluon.language' has no attribute 'thread_barrier'")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(image_attention, "on_hopper", lambda device: True)
    forget()
    yield
    forget()


def forget() -> None:
    image_attention._tried.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, supports: bool = True, aligned: bool = True) -> None:
    fake = SimpleNamespace(image_attention=kernel, supports=lambda *shape: supports, aligned=lambda heads: aligned)
    monkeypatch.setattr(kernels, "image_attention", fake, raising=False)


def attention(fallbacks: Fallbacks) -> ImageAttention:
    return ImageAttention(torch.device("cpu"), torch.float32, N_HEADS, N_KV, DIM, TOKENS, fallbacks)


def attended(own: bool, fallbacks: Fallbacks | None = None) -> None:
    """Three images' tokens, beside other columns, see what they should, in `out` if by our kernel."""
    heads, out = torch.randn(3 * TOKENS, WIDTH + 8)[:, :WIDTH], torch.full((3 * TOKENS, N_HEADS * DIM), torch.nan)
    which = attention(Fallbacks() if fallbacks is None else fallbacks)
    got = which.attend(heads, out)
    assert (got is out) == own
    wanted = seen(heads, 3)
    assert far(got, wanted) < 1e-5
    assert far(which.attend(heads), wanted) < 1e-5


def test_a_kernel_that_is_right_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, right)
    attended(own=True)


@pytest.mark.parametrize(
    ("kernel", "reason"), [(wrong, "relative error 0."), (silent, "relative error nan"), (refused, "no attribute")]
)
def test_one_that_is_wrong_or_cannot_be_compiled_is_not(
    kernel: Kernel, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, kernel)
    with caplog.at_level(logging.WARNING):
        fallbacks = Fallbacks()
        attended(False, fallbacks)
        attended(False, fallbacks)
    (line,) = caplog.messages
    assert fallbacks == [line]
    assert reason in line


def test_nor_is_one_that_this_triton_does_not_know(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(kernels, "image_attention", raising=False)
    monkeypatch.setitem(sys.modules, "saccade.engine.kernels.image_attention", None)
    attended(own=False)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("hint", ["supports", "aligned"])
def test_nor_with_shapes_and_rows_that_it_is_not_for(
    hint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, right, **{hint: False})
    attended(own=False)
    assert caplog.messages == []


def test_nor_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    use(monkeypatch, right)
    attended(own=False)


def test_it_is_tried_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(heads: torch.Tensor, out: torch.Tensor, images: int, n_heads: int, n_kv_heads: int) -> None:
        calls.append(images)
        right(heads, out, images, n_heads, n_kv_heads)

    use(monkeypatch, counted)
    attention(Fallbacks())
    attention(Fallbacks())
    assert calls == [2]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="there is no GPU of Hopper here",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n_heads", "head_dim", "tokens"), [(32, 64, 730), (16, 72, 729)])
def test_moondream_s_shapes_are_attended_to_by_our_kernel(
    n_heads: int, head_dim: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pytest.importorskip("triton").__version__.startswith("3.6"):
        pytest.skip("Gluon of another Triton")
    monkeypatch.undo()
    which = ImageAttention(torch.device("cuda"), dtype, n_heads, n_heads, head_dim, tokens, Fallbacks())
    heads = torch.randn(tokens, 3 * n_heads * head_dim, device="cuda").to(dtype)
    out = torch.full((tokens, n_heads * head_dim), torch.nan, device="cuda", dtype=dtype)
    assert which.attend(heads, out) is out
    assert far(out, image_attention._attend(heads, [n_heads] * 3, head_dim, tokens)) < 0.005
