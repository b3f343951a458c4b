"""What the CPU's oneDNN has, independently of the library: by the CPU, and by the variables that bound it."""

import os

import torch

_BOUND = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").lower()
IS_X86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
CPU_HAS_AVX512 = torch.cpu._is_avx512_supported()
HAS_AVX512 = CPU_HAS_AVX512 and not (_BOUND.startswith("avx2") or _BOUND in ("sse41", "avx"))
TAKES = {
    torch.float32: True,
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
