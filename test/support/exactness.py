"""The operators compared with plain torch, bit by bit, in every way that they can be called."""

import torch
from reference import assert_same, bits, channels_last_of, convert_weight, random_weight

import torch_nhwc as nhwc

CASTS = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
CASTS += [(to, of) for of, to in CASTS]


def unaligned(weight):
    """Return the same weight at an address that is aligned to its elements and to nothing else."""
    memory = torch.empty(weight.numel() + 1, dtype=weight.dtype, device=weight.device)
    return memory[1:].as_strided(weight.shape, weight.stride()).copy_(weight)


def check(shape, dtype, to=None, device="cpu"):
    """Both directions, fresh, preallocated and in place, aligned and not, with guards around what is written."""
    weight = random_weight(shape, dtype, device)
    for memory_format in (None, torch.contiguous_format):
        other = channels_last_of(weight) if memory_format else torch.contiguous_format
        source = weight.clone(memory_format=other)
        expected = convert_weight(source, memory_format, to)
        for each in (source, unaligned(source)):
            assert_same(nhwc.convert_weight(each, memory_format, dtype=to), expected)
            guarded = random_weight((expected.numel() + 34,), expected.dtype, device)
            before = guarded.clone()
            nhwc.ops.copy_weight_(guarded[17:-17].as_strided(shape, expected.stride()), each)
            assert_same(guarded[17:-17].as_strided(shape, expected.stride()), expected)
            for part in (slice(17), slice(-17, None)):
                assert torch.equal(bits(guarded[part]), bits(before[part]))
        if to is None:
            in_place = source.clone()
            assert nhwc.convert_weight_(in_place, memory_format, storage="reuse") in (0, 1, 2)
            assert_same(in_place, expected)


def every_value(of, to):
    """Every number of 16 bits, or floats of every exponent with all kinds of low bits."""
    if of.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(of).view(256, 16, 4, 4)
    high = torch.arange(1 << 16, dtype=torch.int64).view(-1, 1) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFF, 0x1000, 0x1001, 0x2000, 0x2FFF, 0x3000, 0x5555])
    values = torch.cat([high + low, high + torch.randint(0, 1 << 16, (1 << 16, 3))], dim=1)
    return values.to(torch.int32).view(torch.float32).view(1024, 64, 4, 4)
