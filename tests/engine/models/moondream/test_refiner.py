"""The refiner of outlines, held round by round to a slow implementation in numpy's float64, and in an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from saccade.engine import Engine, EngineConfig, EngineError, ModelFilesError, Segment, UnknownModelError
from saccade.engine.image import YuvImage
from saccade.engine.models.moondream.refiner import ROUNDS, MaskRefiner, load_refiner
from saccade.engine.models.moondream.vision import VisionTower
from saccade.engine.results import Outline, Result, Timings
from saccade.engine.runtime.refine import refined
from tests.support.engine import noise, one_thread, random_model
from tests.support.engine.material import DEVICES, OUTLINING, random_refiner, write_enclosing_model

Array = NDArray[np.float64]
ENC, DIM, GRID, SIZE = OUTLINING.vision.enc_dim, 64, OUTLINING.vision.grid, OUTLINING.vision.crop_size


def published(model: MaskRefiner) -> dict[str, torch.Tensor]:
    """Its tensors by the names of the published parts, with other names of layers inside of them."""
    found = {}
    for name, tensor in model.state_dict().items():
        other = name.replace("mask_encoder.conv", "mask_encoder.").replace(".early_proj.0.", ".early_proj.linear.")
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            head, kind = name.split(".q_proj.")
            parts = [model.state_dict()[f"{head}.{one}_proj.{kind}"] for one in "qkv"]
            other, tensor = f"{head}.in_proj_{kind}", torch.cat(parts)
        found[other] = tensor
    return found


def write(path: Path, head: Any) -> Path:
    torch.save({"head": head, "step": 7}, path)
    return path


# ---- slowly


class Slow:
    """The same in float64, from formulas: no torch, a sum for each product."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.state = {name: one.double().numpy() for name, one in state.items()}

    def linear(self, name: str, x: Array) -> Array:
        return np.einsum("...i,oi->...o", x, self.state[f"{name}.weight"]) + self.state[f"{name}.bias"]

    def norm(self, name: str, x: Array, eps: float = 1e-5, axis: int = -1) -> Array:
        """Over channels, which are on `axis`."""
        x = np.moveaxis(x, axis, -1)
        middle = x - x.mean(-1, keepdims=True)
        scaled = middle / np.sqrt((middle**2).mean(-1, keepdims=True) + eps)
        return np.moveaxis(scaled * self.state[f"{name}.weight"] + self.state[f"{name}.bias"], -1, axis)

    def groups(self, name: str, x: Array, count: int) -> Array:
        parts = x.reshape(count, -1)
        middle = parts - parts.mean(1, keepdims=True)
        scaled = (middle / np.sqrt((middle**2).mean(1, keepdims=True) + 1e-5)).reshape(x.shape)
        return scaled * self.state[f"{name}.weight"][:, None, None] + self.state[f"{name}.bias"][:, None, None]

    def conv(self, name: str, x: Array, stride: int = 1) -> Array:
        weight = self.state[f"{name}.weight"]
        side = weight.shape[-1]
        padded = np.pad(x, ((0, 0), (side // 2, side // 2), (side // 2, side // 2)))
        high, wide = (-(-n // stride) for n in x.shape[1:])
        out = np.zeros((len(weight), high, wide))
        for row in range(high):
            for column in range(wide):
                seen = padded[:, row * stride : row * stride + side, column * stride : column * stride + side]
                out[:, row, column] = (weight * seen).sum((1, 2, 3))
        return out + self.state[f"{name}.bias"][:, None, None]

    def grown(self, name: str, x: Array) -> Array:
        """Twice as large: each place becomes 2 × 2."""
        weight = self.state[f"{name}.weight"]
        out = np.zeros((weight.shape[1], 2 * x.shape[1], 2 * x.shape[2]))
        for down in range(2):
            for across in range(2):
                out[:, down::2, across::2] = np.einsum("io,ihw->ohw", weight[:, :, down, across], x)
        return out + self.state[f"{name}.bias"][:, None, None]

    def attend(self, name: str, q: Array, k: Array, v: Array, heads: int) -> Array:
        q, k, v = (self.linear(f"{name}.{one}_proj", x) for one, x in (("q", q), ("k", k), ("v", v)))
        width = q.shape[1] // heads
        seen = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = np.exp(q[:, part] @ k[:, part].T / math.sqrt(width))
            seen.append(scores / scores.sum(1, keepdims=True) @ v[:, part])
        return self.linear(f"{name}.out_proj", np.concatenate(seen, axis=1))

    def dense(self, name: str, x: Array, layers: int) -> Array:
        for number in range(layers):
            x = self.linear(f"{name}.{2 * number}", gelu(x) if number else x)
        return x

    def fuse(self, early: Array, last: Array, grid: int) -> Array:
        def flat(x: Array) -> Array:
            return x.reshape(-1, grid * grid).T

        image = (flat(last.T) @ self.state["image_proj.weight"][:, :, 0, 0].T + self.state["image_proj.bias"]).T
        seen = gelu(self.norm("hq_fusion.early_proj.1", self.linear("hq_fusion.early_proj.0", early))).T
        both = np.concatenate([image, seen]).reshape(-1, grid, grid)
        fused = self.conv("hq_fusion.fusion.1", self.conv("hq_fusion.fusion.0", both))
        return gelu(self.groups("hq_fusion.fusion.2", fused, 32))

    def round(self, image: Array, mask: Array) -> tuple[Array, Array]:
        coded, grid = mask[None], image.shape[1]
        for number, groups in enumerate((1, 8, 16, 32), start=1):
            name = f"mask_encoder.conv{number}"
            coded = gelu(self.groups(f"{name}.1", self.conv(f"{name}.0", coded, 2), groups))
        image = image + scaled(coded, grid, grid)
        places, at = image.reshape(len(image), -1).T, self.state["image_pe"][0].reshape(len(image), -1).T
        tokens, pe = np.concatenate([self.state["iou_token"], self.state["mask_tokens"]]), self.state["output_pe"]
        for number in range(2):
            name = f"transformer_blocks.{number}"
            seen = self.attend(f"{name}.output_self_attn", tokens + pe, tokens + pe, tokens, 8)
            tokens = self.norm(f"{name}.norm1", tokens + seen)
            seen = self.attend(f"{name}.cross_attn_token_to_image", tokens + pe, places + at, places, 8)
            tokens = self.norm(f"{name}.norm2", tokens + seen)
            tokens = self.norm(f"{name}.norm3", tokens + self.dense(f"{name}.mlp", tokens, 2))
            seen = self.attend(f"{name}.cross_attn_image_to_token", places + at, tokens + pe, tokens, 8)
            places = self.norm(f"{name}.norm4", places + seen)
        seen = self.attend("final_token_to_image", tokens + pe, places + at, places, 8)
        tokens = self.norm("final_norm", tokens + seen)
        large = places.T.reshape(-1, grid, grid)
        for number in (0, 6, 12):
            large = gelu(self.norm(f"upsample.{number + 1}", self.grown(f"upsample.{number}", large), 1e-6, 0))
            large = gelu(self.norm(f"upsample.{number + 4}", self.conv(f"upsample.{number + 3}", large), 1e-6, 0))
        pixels, small = large.reshape(len(large), -1).T, self.linear("final_q_proj", tokens[1:])
        small = self.norm("final_norm_up", small + self.attend("final_attn_up", small, pixels, pixels, 4))
        masks = [
            (self.dense(f"mask_mlps.{number}", one, 3)[:, None, None] * large).sum(0)
            for number, one in enumerate(small)
        ]
        return scaled(np.stack(masks), *mask.shape), self.dense("iou_head", tokens[0], 3)


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def rows(x: Array, count: int) -> Array:
    """(h, w) with another number of rows, each between the two nearest ones."""
    found = np.zeros((count, x.shape[1]))
    for place in range(count):
        at = max(0.0, (place + 0.5) * len(x) / count - 0.5)
        low = int(at)
        found[place] = x[low] * (1 - (at - low)) + x[min(low + 1, len(x) - 1)] * (at - low)
    return found


def scaled(x: Array, high: int, wide: int) -> Array:
    """(n, h, w) at another size."""
    return np.stack([rows(rows(plane, high).T, wide).T for plane in x])


def test_every_round_is_that_of_the_slow_implementation() -> None:
    model, dice = random_refiner(), np.random.default_rng(1)
    slow = Slow(model.state_dict())
    early, last = dice.normal(size=(2, GRID * GRID, ENC))
    mask = (dice.random((SIZE, SIZE)) < 0.4).astype(np.float64)
    wide = model.double()
    image, theirs = slow.fuse(early, last, GRID), wide.fuse(*(torch.from_numpy(x)[None] for x in (early, last)))
    np.testing.assert_allclose(theirs[0].numpy(), image, atol=1e-9)
    guess, chosen, seen = mask, set(), [mask]
    for _ in range(ROUNDS):
        masks, quality = slow.round(image, guess)
        got, liked = wide.round(torch.from_numpy(image)[None], torch.from_numpy(guess)[None, None])
        np.testing.assert_allclose(got[0].numpy(), masks, atol=1e-8)
        np.testing.assert_allclose(liked[0].numpy(), quality, atol=1e-8)
        best = int(quality.argmax())
        chosen.add(best)
        guess = 1 / (1 + np.exp(-masks[best]))
        seen.append(guess)
    assert all(np.abs(one - other).max() > 1e-3 for one, other in pairwise(seen[:3]))
    found = random_refiner()(
        *(torch.from_numpy(x).float()[None] for x in (early, last)), torch.from_numpy(mask).float()
    )
    np.testing.assert_allclose(found.numpy(), guess, atol=1e-3)


def test_the_published_shape_loads_from_published_names(tmp_path: Path) -> None:
    with torch.device("meta"):
        tower = VisionTower(OUTLINING.vision.__class__())
    head = random_refiner(1152, 256, 27, 256)
    assert 6e6 < sum(one.numel() for one in head.parameters()) < 7e6
    tower.pos_emb = torch.nn.Parameter(torch.zeros(1, 729, 1152))
    loaded = load_refiner(write(tmp_path / "model.pt", published(head)), tower)
    assert loaded.early_block == 8
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert (
        load_refiner(write(tmp_path / "wide.pt", random_refiner(1152, 64, 27, 128).state_dict()), tower).image_pe.shape[
            1
        ]
        == 64
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda head: {},
            "not a mask refiner: the file has no tensors under 'head'|'image_proj.weight' is missing",
        ),
        (lambda head: 7, "no tensors under 'head'"),
        (lambda head: head | {"image_pe": torch.zeros(3)}, "'image_pe' is missing or does not have 4 dimensions"),
        (
            lambda head: head | {"image_pe": torch.zeros(1, DIM, 5, 5)},
            "expects a 5 x 5 feature map with 16 channels, but the model has 4 x 4 with 16",
        ),
        (lambda head: {k: v for k, v in head.items() if k != "iou_token"}, "'iou_token' is missing"),
        (
            lambda head: head | {"mask_tokens": torch.zeros(3, DIM)},
            rf"'mask_tokens' is missing, or its shape is not \[4, {DIM}\]",
        ),
        (lambda head: head | {"other.weight": torch.zeros(3)}, r"'other.weight' \[3\] is not part of a refiner"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(ModelFilesError, match=says) as caught:
        load_refiner(
            write(tmp_path / "model.pt", change(random_refiner().state_dict())), random_model(OUTLINING).vision
        )  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nothing like it"])
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(ModelFilesError, match="not a PyTorch file that contains only tensors") as caught:
        load_refiner(tmp_path / "model.pt", random_model(OUTLINING).vision)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# ---- in an engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_enclosing_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("refiner") / "model.pt", published(random_refiner()))


@pytest.fixture(scope="module", params=DEVICES)
def engine(folder: Path, file: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with one_thread(), Engine.load(str(folder), request.param, "float32", refiner=str(file)) as engine:
        yield engine


def slowly(crop: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The better mask of a crop by the slow implementation; the tower's features from its own modules, in float64."""
    pixels = np.round(scaled(crop.astype(np.float64).transpose(2, 0, 1), SIZE, SIZE))
    nearest = mask[np.arange(SIZE) * len(mask) // SIZE][:, np.arange(SIZE) * mask.shape[1] // SIZE]
    tower = random_model(OUTLINING).vision.double()
    x = tower.patches(torch.from_numpy((pixels / 255 - 0.5) / 0.5)[None]) + tower.pos_emb
    early = tower.blocks[0](x)
    slow, guess = Slow(random_refiner().state_dict()), nearest.astype(np.float64)
    fused = slow.fuse(early[0].numpy(), tower.post_ln(early)[0].numpy(), GRID)
    for _ in range(ROUNDS):
        masks, quality = slow.round(fused, guess)
        guess = 1 / (1 + np.exp(-masks[int(quality.argmax())]))
    better: NDArray[np.bool_] = scaled(guess[None], *mask.shape)[0] > 0.5
    return better


def iou(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    return float((one & other).sum() / max(1, (one | other).sum()))


def test_masks_are_those_of_the_slow_implementation(engine: Engine) -> None:
    assert engine._refiner is not None
    for seed in range(6):
        crop, dice = noise(40 + seed, 60 - seed, seed), np.random.default_rng(seed)
        mask = dice.random(crop.shape[:2]) < 0.5
        wanted, got = slowly(crop, mask), engine._refiner._better(crop, mask)
        assert (wanted != got).mean() < (0.002 if engine.model.gpu is None else 0.02)  # next to a half
        assert 0 < wanted.mean() < 1


ASKED = Segment("300", max_tokens=60, temperature=3.0, seed=1)


def coarse(folder: Path, image: NDArray[np.uint8]) -> Outline:
    with Engine.load(str(folder), "cpu") as plain:
        (outline,) = plain.submit(image, [ASKED]).result(60).segments
    return outline


def test_outlines_are_refined_whatever_the_image_is_given_as(engine: Engine, folder: Path) -> None:
    image = noise(60, 80, 3)
    plain = coarse(folder, image)
    assert not plain.refined
    assert plain.mask(80, 60).any()
    (found,) = engine.submit(image, [ASKED]).result(60).segments
    assert found.refined
    assert found != plain
    assert (found.label, found.tokens) == (plain.label, plain.tokens)
    (wanted,) = refined(Result.of([plain], 80, 60, Timings()), image, slowly).segments
    assert iou(found.mask(80, 60), wanted.mask(80, 60)) > 0.95
    with engine.encode(image) as encoded:
        assert engine.submit(encoded, [ASKED]).result(60).segments[0] == found
    assert engine.submit(lambda: image, [ASKED]).result(60).segments == (found,)
    assert engine.submit(lambda: image, [ASKED], stream="door").result(60).segments == (found,)
    assert engine.submit(torch.from_numpy(image.copy()), [ASKED]).result(60).segments == (found,)
    planes = [torch.from_numpy(np.full(shape, 90, np.uint8)) for shape in ((60, 80), (30, 40), (30, 40))]
    video = YuvImage(*planes, (104597, 132201, 25675, 53279), False)
    assert (
        engine.submit(lambda: video, [ASKED], stream="door").result(60).segments
        == engine.submit(video.rgb(), [ASKED]).result(60).segments
    )
    with engine.stream(image, ASKED) as stream:
        first, *pieces = stream
        assert first.startswith("{")
        assert "".join(pieces) == plain.path
        assert stream.result.segments == (found,)


def test_what_is_submitted_is_refined_before_the_engine_closes(folder: Path, file: Path) -> None:
    image = noise(60, 80, 3)
    with Engine.load(str(folder), "cpu", refiner=str(file)) as engine:
        futures = [engine.submit(image, [ASKED]) for _ in range(5)]
        assert futures[4].cancel()
        before = futures[0].result(60)
    assert all(future.result(0).segments == before.segments for future in futures[:4])
    assert before.segments[0].refined
    assert futures[4].cancelled()


def test_where_it_fails_the_coarse_outline_stands(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> Any:
        raise RuntimeError("no memory\nand more")

    image = noise(60, 80, 3)
    monkeypatch.setattr(engine._refiner, "_probabilities", fail)
    for _ in range(2):
        (found,) = engine.submit(image, [ASKED]).result(60).segments
        assert not found.refined
        assert found.mask(80, 60).any()
    assert [record.getMessage() for record in caplog.records] == [
        "the mask refiner failed, so segmentation masks stay coarse: no memory"
    ]
    monkeypatch.undo()
    assert engine.submit(image, [ASKED]).result(60).segments[0].refined


def test_what_cannot_be_refined_is_one_line(folder: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nano does not support a mask refiner; use Moondream 3") as caught:
        Engine.load("nano", "cpu", refiner=str(file))
    assert "\n" not in str(caught.value)
    with pytest.raises(UnknownModelError, match=r"unknown refiner '.*none\.pt': use a file or a Hugging Face Hub ID"):
        Engine.load(str(folder), "cpu", refiner=str(tmp_path / "none.pt"))
    with pytest.raises(ValueError, match="refiner must be a file path, a Hugging Face Hub ID or None; got 7"):
        EngineConfig(refiner=7)  # type: ignore[arg-type]


# ---- from a mask to a path


BOX = "M 0 0 L 1 0 L 1 1 L 0 1 Z"


def drawn(height: int, width: int, shape: NDArray[np.bool_], box: tuple[float, float, float, float]) -> Outline:
    """What becomes of a box's outline where `shape` is white in the image, and a refiner finds what is white."""
    image = np.where(shape[..., None], 255, 20).astype(np.uint8).repeat(3, axis=2)
    result = Result.of([Outline("x", BOX, box, True)], width, height, Timings())
    (found,) = refined(result, image, lambda crop, mask: crop[..., 0] > 100).segments
    return found


@pytest.mark.parametrize(("height", "width"), [(90, 120), (360, 640), (1080, 1920)])
def test_a_better_mask_is_drawn_where_it_is(height: int, width: int) -> None:
    y, x = (np.mgrid[:height, :width] + 0.5) / np.array([height, width])[:, None, None]
    shape = np.hypot((x - 0.5) / 0.2, (y - 0.4) / 0.3) < 1
    shape &= np.hypot((x - 0.5) / 0.05, (y - 0.4) / 0.1) > 1  # a hole
    specks = shape.copy()
    specks[height // 5 : height // 5 + 2, width // 2] ^= True
    specks[round(0.72 * height), round(0.66 * width)] = True
    found = drawn(height, width, specks, (0.32, 0.12, 0.7, 0.72))
    assert found.refined
    assert iou(found.mask(width, height), shape) > 0.98
    assert len(found.polygons()) == 2
    assert found.box == pytest.approx((0.3, 0.1, 0.7, 0.7), abs=2 / height)


def test_nothing_is_made_of_nothing() -> None:
    empty = np.zeros((50, 60), bool)
    assert not drawn(50, 60, empty, (0.1, 0.1, 0.5, 0.5)).refined
    assert not drawn(50, 60, ~empty, (0.3, 0.3, 0.3, 0.3)).refined
    assert not drawn(50, 60, ~empty, (1.0, 1.0, 1.0, 1.0)).refined


def test_a_small_object_is_kept_whole() -> None:
    shape = np.zeros((500, 500), bool)
    shape[100:104, 200:206] = True
    found = drawn(500, 500, shape, (0.39, 0.19, 0.42, 0.22))
    assert np.array_equal(found.mask(500, 500), shape)
    assert found.box == pytest.approx((0.4, 0.2, 0.412, 0.208))
