"""The operators in plain torch, and weights for tests."""

import torch

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = {
    1: [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
    + [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu],
    2: [torch.float16, torch.bfloat16, torch.int16, torch.uint16],
    4: [torch.float32, torch.int32, torch.uint32, torch.complex32],
    8: [torch.float64, torch.int64, torch.uint64, torch.complex64],
    16: [torch.complex128],
}
ALL_DTYPES = [dtype for dtypes in DTYPES.values() for dtype in dtypes]
FLOATING_DTYPES = [dtype for dtype in ALL_DTYPES if dtype.is_floating_point]
# Sizes of 1 and 0 in every position, one tap, one channel, several strips, 4D and 5D.
SHAPES = [
    (4, 3, 3, 3),
    (1, 3, 3, 3),
    (4, 1, 3, 3),
    (4, 3, 1, 3),
    (4, 3, 3, 1),
    (4, 3, 1, 1),
    (4, 1, 1, 1),
    (1, 3, 1, 1),
    (1, 1, 3, 3),
    (1, 1, 1, 1),
    (0, 3, 3, 3),
    (4, 0, 3, 3),
    (4, 3, 0, 3),
    (5, 67, 5, 5),
    (3, 130, 7, 11),
    (4, 3, 3, 3, 3),
    (4, 3, 1, 3, 1),
    (4, 1, 2, 3, 4),
    (4, 3, 1, 1, 1),
    (1, 1, 1, 1, 1),
    (2, 0, 3, 3, 3),
    (3, 66, 3, 3, 3),
]
SOURCES = ["contiguous", "channels_last", "sliced", "offset", "permuted", "expanded", "flipped_sizes"]


def channels_last_of(weight):
    return FORMATS[weight.dim()]


def canonical_strides(shape, memory_format):
    return torch.empty(shape, memory_format=memory_format, device="meta").stride()


def in_channels_last(tensor):
    return tensor.stride() == canonical_strides(tensor.shape, FORMATS[tensor.dim()])


def random_weight(shape, dtype=torch.float32, device="cpu"):
    """Return random bytes as numbers of `dtype`; booleans are 0 or 1."""
    count = int(torch.Size(shape).numel())
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).bool()
    values = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return values.view(dtype).view(shape).to(device)


def arrange(weight, source):
    """Return a weight of the same values, with its memory arranged as `source` says."""
    size = weight.shape
    if source == "contiguous":
        return weight.clone(memory_format=torch.contiguous_format)
    if source == "channels_last":
        out = torch.empty(size, dtype=weight.dtype, device=weight.device, memory_format=channels_last_of(weight))
    elif source == "sliced":
        wide = (size[0], size[1] * 2, *size[2:])
        out = torch.empty(wide, dtype=weight.dtype, device=weight.device)[:, ::2]
    elif source == "offset":
        flat = torch.empty(weight.numel() + 3, dtype=weight.dtype, device=weight.device)
        out = flat[3:].view(size)
    elif source == "permuted":
        out = torch.empty((size[1], size[0], *size[2:]), dtype=weight.dtype, device=weight.device).transpose(0, 1)
    elif source == "expanded":
        return weight[:1].expand(size) if size[0] else weight
    elif source == "flipped_sizes":
        out = torch.empty(size[::-1], dtype=weight.dtype, device=weight.device).permute(*reversed(range(len(size))))
    return out.copy_(weight)


def convert_weight(weight, memory_format=None, dtype=None):
    """Do what `torch.ops.nhwc.convert_weight` has to do, in plain torch."""
    memory_format = memory_format or channels_last_of(weight)
    out = torch.empty(weight.shape, dtype=dtype or weight.dtype, device=weight.device, memory_format=memory_format)
    return out.copy_(weight)


def bits(tensor):
    """Return the elements as bytes in logical order, to compare them bit by bit."""
    return tensor.detach().resolve_conj().cpu().contiguous().view(-1).view(torch.uint8)


def assert_same(actual, expected):
    """Expect equal shapes, dtypes, devices, strides and bits. Every NaN equals every other one."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.device == expected.device
    assert actual.stride() == expected.stride()
    if torch.equal(bits(actual), bits(expected)):
        return
    assert actual.dtype.is_floating_point
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=0, equal_nan=True)
