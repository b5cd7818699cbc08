"""Weights of few bits: the blocks of GGUF files, the same made of any weights, and the form that products read.

A block is 32 neighbouring weights of one row: integers, a scale in half precision, in Q4_1 an offset too. `pack` moves
bits and rounds nothing. The tiles that it makes are those of native/quantized.inc; without the native library,
`dequantize` gives the weights back as numbers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch.nn import functional

from executor.backends.base import BlockWeight

BLOCK = 32  # inputs with one scale
PANEL = 16  # outputs that lie side by side
QUANTIZATIONS = ("none", "int8", "gguf")


class Kind(enum.IntEnum):
    """Named as in GGUF files, numbered as in native/interface.h."""

    Q8_0 = 0
    Q4_0 = 1
    Q4_1 = 2

    @property
    def bits(self) -> int:
        return 8 if self is Kind.Q8_0 else 4

    @property
    def num_halves(self) -> int:
        """Numbers in half precision that a block begins with."""
        return 2 if self is Kind.Q4_1 else 1

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_halves + BLOCK * self.bits // 8


KINDS = frozenset(kind.name for kind in Kind)


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Weights in tiles: [panels, blocks] of scales, offsets and words of PANEL outputs each."""

    kind: Kind
    tiles: torch.Tensor  # [ceil(out_features / PANEL), blocks, PANEL * kind.block_bytes] uint8
    bias: torch.Tensor | None  # [out_features]
    in_features: int
    out_features: int


def quantize(weight: torch.Tensor) -> BlockWeight:
    """weight [out_features, in_features] of any float format -> Q8_0: integers in [-127, 127], symmetric, one scale for
    each 32 inputs; a row's last block is filled up with zeros."""
    padded = functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK))
    blocks = padded.view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    divisors = scales.float().masked_fill(scales == 0, 1.0)
    numbers = (blocks / divisors).round().clamp(-127, 127).to(torch.int8)
    data = torch.cat((scales.view(torch.uint8), numbers.view(torch.uint8)), dim=-1)
    return BlockWeight(Kind.Q8_0.name, data.view(len(weight), -1), weight.shape[1])


def pack(weight: BlockWeight, bias: torch.Tensor | None) -> QuantizedLinear:
    """Blocks of a kind in KINDS, with their bits in the order that the products read."""
    kind, out_features = Kind[weight.kind], len(weight.blocks)
    blocks = functional.pad(weight.blocks, (0, 0, 0, -out_features % PANEL))
    blocks = blocks.view(len(blocks), -1, kind.block_bytes)
    header, numbers = torch.split(blocks, [2 * kind.num_halves, kind.block_bytes - 2 * kind.num_halves], dim=-1)
    if kind.bits == 4:  # the low halves of the bytes are inputs 0 to 15, the high ones 16 to 31
        numbers = torch.cat((numbers & 15, numbers >> 4), dim=-1)
    fields = numbers.reshape(*numbers.shape[:-1], -1, 32 // kind.bits)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32)
    for index, shift in enumerate(_shifts(kind)):
        words |= fields[..., index].int() << shift
    halves = header.contiguous().view(torch.int16)
    tiles = torch.cat((_side_by_side(halves), _side_by_side(words)), dim=-1)
    return QuantizedLinear(kind, tiles, bias, weight.in_features, out_features)


def dequantize(linear: QuantizedLinear) -> torch.Tensor:
    """[out_features, in_features] float32, exactly what the products multiply with."""
    kind = linear.kind
    header_bytes = 2 * PANEL * kind.num_halves
    header, rest = torch.split(linear.tiles, [header_bytes, PANEL * kind.block_bytes - header_bytes], dim=-1)
    halves = _row_by_row(header.contiguous().view(torch.float16)).float()  # [rows, blocks, num_halves]
    words = _row_by_row(rest.contiguous().view(torch.int32))
    fields = [(words >> shift) & (2**kind.bits - 1) for shift in _shifts(kind)]
    numbers = torch.stack(fields, dim=-1).flatten(-2)  # [rows, blocks, BLOCK]
    if kind is Kind.Q8_0:
        numbers = numbers.to(torch.int8)
    elif kind is Kind.Q4_0:
        numbers = numbers - 8
    values = numbers.float() * halves[..., :1]
    if kind is Kind.Q4_1:
        values += halves[..., 1:]
    return values.flatten(1)[: linear.out_features, : linear.in_features].contiguous()


def _shifts(kind: Kind) -> list[int]:
    """Where each input of a word stands in it: those of a pair are 16 bits apart."""
    return [index // 2 * kind.bits + index % 2 * 16 for index in range(32 // kind.bits)]


def _side_by_side(values: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, n] -> [panels, blocks, bytes of n * PANEL]."""
    panels = values.reshape(-1, PANEL, *values.shape[1:])
    return panels.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.uint8)


def _row_by_row(values: torch.Tensor) -> torch.Tensor:
    """[panels, blocks, n * PANEL] -> [rows, blocks, n]."""
    lanes = values.reshape(*values.shape[:2], -1, PANEL)
    return lanes.permute(0, 3, 1, 2).flatten(0, 1)
