"""LoRA adapters: read their files, copy their matrices to the device, and apply one adapter to each row of a batch.

Three file formats are supported:

- Saccade's own safetensors file. The modules `attn.qkv`, `attn.proj`, `mlp.fc1` and `mlp.fc2` of `text.blocks.<n>.` may
  have matrices `….A` (rank, in) and `….B` (out, rank). The result of a module is W x + alpha / rank · B A x. The file's
  metadata may contain `alpha`; its default is the rank. For experts, the shapes are (experts, rank, in) and (experts,
  out, rank).
- PEFT folders (adapter_model.safetensors and adapter_config.json) with tensor names such as
  `base_model.model.….lora_A.weight`.
- torch files of Moondream's fine-tuning service. Their `lora_state_dict` contains matrices `dense.<n>.` for MLPs and
  `moe.<n>.` for experts. They are loaded with `weights_only`, so no pickled code runs.
"""

from __future__ import annotations

import copy
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from saccade.engine.errors import AdapterError
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.text import Block, TextDecoder
from saccade.engine.models.protocol import Adapter
from saccade.engine.models.protocol import TextDecoder as AnyDecoder

_PARTS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
_NAME = re.compile(
    r"(?:.*\.)?text\.blocks\.(\d+)\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(?:lora_)?([AB])(?:\.weight)?"
)


_TUNED = re.compile(r"(?:.*\.)?(dense|moe)\.(\d+)\.(up|down)_([ab])")


def load_adapter(name: str, path: Path, text: AnyDecoder, max_rank: int) -> Adapter:
    """Read a LoRA adapter from a file, and move its matrices to the device and dtype of a text decoder.

    Args:
        name: name of the adapter, for error messages.
        path: a safetensors file, a torch file of Moondream's fine-tuning service, or a PEFT folder.
        text: the text decoder.
        max_rank: maximum rank of an adapter. For experts, the limit is `max_rank` divided by the number of experts per
            token.

    Raises:
        AdapterError: if the file cannot be read or does not match the decoder. The message names the first invalid
            tensor.
    """
    if not isinstance(text, TextDecoder):
        raise AdapterError(f"{type(text).__name__} does not support LoRA adapters; use a Moondream model")
    file = path / "adapter_model.safetensors" if path.is_dir() else path
    try:
        found, alpha = _read_safetensors(file, text) if _is_safetensors(file) else _read_tuned(file, text)
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterError(f"{file}: {error}") from error
    if not found:
        raise AdapterError(f"{file}: the file contains no LoRA matrices")
    weights = {}
    for (layer, part), pair in found.items():
        block, where = text.blocks[layer], f"{file}: text.blocks.{layer}.{part}"
        assert isinstance(block, Block)
        if len(pair) < 2:
            raise AdapterError(f"{where}: LoRA matrix {'B' if 'A' in pair else 'A'} is missing")
        a, b = pair["A"], pair["B"]
        rank = a.shape[-2] if a.ndim > 1 else 0
        ours_a, ours_b = _shapes(block, part, rank, where, a.ndim)
        if a.shape != ours_a or b.shape != ours_b:
            wanted = f"LoRA matrices A and B must have shapes {_named(ours_a, -2)} and {_named(ours_b, -1)}"
            raise AdapterError(f"{where}: {wanted}; got {tuple(a.shape)} and {tuple(b.shape)}")
        whole = rank * block.mlp.config.experts_per_token if a.ndim == 3 and isinstance(block.mlp, Experts) else rank
        if whole > max_rank:
            raise AdapterError(
                f"{where} has rank {whole}; the maximum is {max_rank}; load the engine with adapter_rank={whole}"
            )
        scale = 1.0 if alpha is None else alpha / rank
        like = text.wte  # the embeddings have the dtype of the model; kernels may store layers in another dtype
        kept = a.to(like.device, like.dtype), (b.float() * scale).to(like.device, like.dtype)
        # NaN would remain in the KV cache and affect the next sequence.
        if not all(bool(one.isfinite().all()) for one in kept):
            raise AdapterError(f"{where} contains NaN or values too large for {like.dtype}")
        weights[layer, part] = kept
    if text.wte.is_cuda:  # wait, because another CUDA stream reads the matrices
        torch.cuda.current_stream(text.wte.device).synchronize()
    return Adapter(name, weights)


_Pairs = dict[tuple[int, str], dict[str, torch.Tensor]]
"""Matrices 'A' and 'B' by layer and module."""


def _is_safetensors(file: Path) -> bool:
    """Return whether a file is a safetensors file, which starts with a length of eight bytes and a JSON object."""
    with file.open("rb") as opened:
        return opened.read(9)[8:] == b"{" or file.suffix == ".safetensors"


def _read_safetensors(file: Path, text: TextDecoder) -> tuple[_Pairs, float | None]:
    found: _Pairs = {}
    with safe_open(file, framework="pt") as tensors:
        alpha = _alpha(file, tensors.metadata() or {})
        for key in tensors.keys():  # noqa: SIM118
            match = _NAME.fullmatch(key)
            if match is None or int(match[1]) >= len(text.blocks):
                raise AdapterError(f"{file}: tensor '{key}' is unknown to the model's text decoder")
            found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensors.get_tensor(key)
    return found, alpha


def _read_tuned(file: Path, text: TextDecoder) -> tuple[_Pairs, None]:
    """Read an adapter file of Moondream's fine-tuning service. The file has no alpha, so the LoRA scale is 1."""
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch and pickle raise many types of errors, with advice in many lines
        message = "neither a safetensors file nor a torch file that contains only tensors"
        raise AdapterError(f"{file}: {message} ({type(error).__name__})") from None
    tensors = stored.get("lora_state_dict") if isinstance(stored, Mapping) else None
    if not isinstance(tensors, Mapping):
        raise AdapterError(f"{file}: not a LoRA adapter: the torch file has no 'lora_state_dict'")
    found: _Pairs = {}
    moe = text.config.moe
    dense = len(text.blocks) if moe is None else min(moe.start_layer, len(text.blocks))
    for key, tensor in tensors.items():
        match = _TUNED.fullmatch(str(key))
        layer = -1 if match is None else int(match[2]) + (dense if match[1] == "moe" else 0)
        limit = dense if match is not None and match[1] == "dense" else len(text.blocks)
        if match is None or layer >= limit or not isinstance(tensor, torch.Tensor):
            raise AdapterError(f"{file}: tensor '{key}' is unknown to the model's text decoder")
        found.setdefault((layer, "mlp.fc1" if match[3] == "up" else "mlp.fc2"), {})[match[4].upper()] = tensor
    ranks = {
        a.shape[-2] * (moe.experts_per_token if moe is not None and a.ndim == 3 else 1)
        for pair in found.values()
        if (a := pair.get("A")) is not None and a.ndim > 1
    }
    if len(ranks) > 1:
        raise AdapterError(f"{file}: all LoRA matrices must have the same rank; found ranks {sorted(ranks)}")
    return found, None


def _shapes(block: Block, part: str, rank: int, where: str, dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the required shapes of the LoRA matrices A and B of a module."""
    experts = block.mlp if part.startswith("mlp.") and isinstance(block.mlp, Experts) else None
    if experts is None:
        base = block.get_submodule(part)
        assert isinstance(base, nn.Linear)
        return (rank, base.in_features), (base.out_features, rank)
    if dimensions != 3:
        raise AdapterError(
            f"{where}: LoRA matrices of experts must have 3 dimensions; the first is the number of experts"
        )
    weight = experts.get_submodule(part.removeprefix("mlp.")).weight
    assert isinstance(weight, torch.Tensor)
    if block.attn.qkv.weight.dtype.itemsize < 2:
        raise AdapterError(f"{where}: FP8 experts do not support adapters; load the model with dtype bfloat16")
    number, out, inner = weight.shape
    return (number, rank, inner), (number, out, rank)


def _named(shape: tuple[int, ...], at: int) -> str:
    """Format a tensor shape for an error message, with "rank" in place of dimension `at`."""
    names: list[object] = [*shape]
    names[at] = "rank"
    return f"({', '.join(map(str, names))})"


class AdapterBank:
    """Copy of the text decoder that applies a different LoRA adapter to each row of a batch.

    The copy shares the model's weights.

    The LoRA matrices of all adapter slots are concatenated, and the results of other slots are masked. Shapes are
    therefore fixed, so CUDA graphs can capture the computation. Slot 0 means no adapter.

    Args:
        text: text decoder of the model.
        n_slots: number of adapter slots.
        rank: maximum rank of an adapter.

    Raises:
        AdapterError: if the text decoder does not support LoRA adapters.
    """

    def __init__(self, text: AnyDecoder, n_slots: int, rank: int) -> None:
        if not isinstance(text, TextDecoder):
            raise AdapterError(f"{type(text).__name__} does not support LoRA adapters; use a Moondream model")
        # The copies share all tensors with the model.
        self._text = copy.deepcopy(text, {id(one): one for one in chain(text.parameters(), text.buffers())})
        self._layers: dict[tuple[int, str], _AdaptedLinear] = {}
        self._experts: dict[int, _AdaptedExperts] = {}
        self.has_experts = False
        self._resident: dict[int, weakref.ref[Adapter]] = {}  # weak references, so that unloaded adapters are freed
        self._rank = rank
        self._column_slots = torch.arange(1, n_slots + 1, device=text.wte.device).repeat_interleave(rank)
        for number, block in enumerate(self._text.blocks):
            assert isinstance(block, Block)
            if isinstance(block.mlp, Experts):
                own = max(1, rank // block.mlp.config.experts_per_token)
                self._experts[number] = experts = _AdaptedExperts(block.mlp, n_slots, own, text.wte)
                block.mlp = experts
            for part in _PARTS:
                base = block.get_submodule(part)
                if isinstance(base, nn.Linear):  # not a mixture of experts
                    self._layers[number, part] = adapted = _AdaptedLinear(base, n_slots, rank, text.wte)
                    block.set_submodule(part, adapted)

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Copy a LoRA adapter into a slot, unless the slot already contains it."""
        resident = self._resident.get(slot)
        if resident is not None and resident() is adapter:
            return
        self._resident.pop(slot, None)
        for place, layer in self._layers.items():
            layer.fill(slot, adapter.weights.get(place))
        for number, experts in self._experts.items():
            pairs = [adapter.weights.get((number, part)) for part in ("mlp.fc1", "mlp.fc2")]
            self.has_experts |= any(pairs)
            experts.fill(slot, pairs)
        self._resident[slot] = weakref.ref(adapter)

    def text(self, slots: torch.Tensor) -> TextDecoder:
        """Return the text decoder with the LoRA adapters of a batch. `slots` (rows,) int: adapter slot of each row."""
        others = self._others(slots).unsqueeze(1)
        for layer in self._layers.values():
            layer.others = others
        for experts in self._experts.values():
            experts.slots = slots
        return self._text

    def rows(self, slots: torch.Tensor) -> AdaptedRows:
        """Return the LoRA adapters of a batch. `slots` (rows,) int is the adapter slot of each row."""
        return AdaptedRows(self._layers, self._others(slots))

    def _others(self, slots: torch.Tensor) -> torch.Tensor:
        """Return a mask (rows, columns of all adapters): False for the columns of the row's own LoRA adapter."""
        return self._column_slots != slots.unsqueeze(1)


class _AdaptedLinear(nn.Linear):
    def __init__(self, base: nn.Linear, n_slots: int, rank: int, like: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.rank = rank
        self.a = like.new_zeros(n_slots * rank, base.in_features)
        self.b = like.new_zeros(base.out_features, n_slots * rank)
        self.others = torch.ones(1, 1, n_slots * rank, dtype=torch.bool, device=like.device)

    def fill(self, slot: int, weights: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Copy the LoRA matrices of an adapter into a slot, or zeros if `weights` is None. Slots start at 1."""
        first = (slot - 1) * self.rank
        own = slice(first, first + self.rank)
        self.a[own].zero_()
        self.b[:, own].zero_()
        if weights is not None:
            a, b = weights
            self.a[first : first + len(a)] = a
            self.b[:, first : first + len(a)] = b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x @ self.a.t()).masked_fill(self.others, 0.0) @ self.b.t()


class _AdaptedExperts(Experts):
    """Mixture of experts with a LoRA adapter for each row of a batch.

    `slots` (rows,) contains the adapter slot of each row of the next batch. The memory of all slots is allocated when
    the first adapter that changes expert weights is loaded.
    """

    def __init__(self, base: Experts, n_slots: int, rank: int, like: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.config, self.scales, self.approximate = base.config, base.scales, base.approximate
        self.router, self.fc1, self.fc2 = base.router, base.fc1, base.fc2
        self.rank, self.n_slots, self.like = rank, n_slots, like
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.slots = torch.zeros(1, dtype=torch.int64)
        self._others = torch.zeros(0)
        self._column_slots = torch.arange(1, n_slots + 1, device=like.device).repeat_interleave(rank)

    def fill(self, slot: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """Copy the LoRA matrices of an adapter for the experts into a slot. Slots are numbered from 1."""
        if not self.pairs:
            if not any(pairs):
                return
            columns = self.n_slots * self.rank
            for weight in (self.fc1.weight, self.fc2.weight):
                number, out, inner = weight.shape
                a, b = self.like.new_zeros(number, columns, inner), self.like.new_zeros(number, out, columns)
                self.pairs.append((a, b))
        first = (slot - 1) * self.rank
        for (a, b), given in zip(self.pairs, pairs, strict=True):
            a[:, first : first + self.rank].zero_()
            b[:, :, first : first + self.rank].zero_()
            if given is not None:
                rank = given[0].shape[1]
                a[:, first : first + rank] = given[0]
                b[:, :, first : first + rank] = given[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pairs:
            others = self._column_slots != self.slots.to(x.device).unsqueeze(1)
            self._others = others.repeat_interleave(x[0, ..., 0].numel(), 0)
        return super().forward(x)

    def _product(self, second: int, x: torch.Tensor, which: int | slice, rows: torch.Tensor | slice) -> torch.Tensor:
        plain = super()._product(second, x, which, rows)
        if not self.pairs:
            return plain
        a, b = self.pairs[second]
        low = (x @ a[which].transpose(-1, -2)).masked_fill(self._others[rows], 0.0)
        return plain + low @ b[which].transpose(-1, -2)


class AdaptedRows:
    """Adds the LoRA adapter of each row to the module outputs of one batch; see `AdapterBank.rows`."""

    __slots__ = ("_layers", "_others")

    def __init__(self, layers: Mapping[tuple[int, str], _AdaptedLinear], others: torch.Tensor) -> None:
        self._layers, self._others = layers, others

    def add(self, number: int, part: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the output of each row's LoRA adapter to the output of a module, in place.

        Args:
            number: index of the decoder block.
            part: name of the module in the block, such as `mlp.fc1`.
            x: (rows, in) input of the module.
            out: (rows, out) output of the module.
        """
        layer = self._layers[number, part]
        out.addmm_((x @ layer.a.t()).masked_fill_(self._others, 0.0), layer.b.t())

    def spread(self, count: int, length: int) -> AdaptedRows:
        """Return one LoRA adapter per token. The first `count` rows are images with `length` tokens each."""
        images = self._others[:count].repeat_interleave(length, 0)
        return AdaptedRows(self._layers, torch.cat([images, self._others[count:]]))

    def behind(self, first: int) -> AdaptedRows:
        """Return the LoRA adapters of all rows with index `first` or higher."""
        return AdaptedRows(self._layers, self._others[first:])


def _alpha(file: Path, metadata: dict[str, str]) -> float | None:
    """Return the LoRA scale parameter alpha from the metadata of a file or from PEFT's adapter_config.json, or None.

    Raises:
        ValueError: if adapter_config.json sets an unsupported option.
    """
    config = file.parent / "adapter_config.json"
    if "alpha" in metadata:
        return float(metadata["alpha"])
    if file.name != "adapter_model.safetensors" or not config.is_file():
        return None
    options = json.loads(config.read_text(encoding="utf-8"))
    for option in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if options.get(option):
            raise ValueError(f"adapter_config.json: {option} is not supported")
    return float(options["lora_alpha"])
