"""The hash of `noise` as a Triton kernel, for a CUDA device; integers alone, so that its bits are the CPU's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

HASH_BLOCK = 1024


@triton.jit
def hash_tokens(word_ptr, bits_ptr, count, BLOCK: tl.constexpr):
    """32 random bits of each token: `word_ptr` is int32 [T, 2], `bits_ptr` int32 [T, count]; a program has a block."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(word_ptr + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(word_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    # Unsigned, so that a right shift fills with zeros.
    bits = mix(token.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32) + first)
    bits = mix(bits ^ second)
    tl.store(bits_ptr + row * count + token, bits.to(tl.int32, bitcast=True), mask=token < count)


@triton.jit
def mix(bits):
    """`noise._mix`."""
    bits = (bits ^ (bits >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return bits ^ (bits >> 16)


def random_bits(words_T2: Tensor, count: int) -> Tensor:
    """`noise._bits` of the tokens 0 to count − 1, on the device of the words: int32 [T, count]."""
    bits_TV = torch.empty(len(words_T2), count, dtype=torch.int32, device=words_T2.device)
    if bits_TV.numel():
        hash_tokens[(len(words_T2), triton.cdiv(count, HASH_BLOCK))](
            words_T2.contiguous(), bits_TV, count, BLOCK=HASH_BLOCK
        )
    return bits_TV
