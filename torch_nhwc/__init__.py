"""Convolution weights, and whole models, into channels-last memory format."""

from torch_nhwc import functional
from torch_nhwc import sharding as _sharding
from torch_nhwc.batching.batches import to_channels_last
from torch_nhwc.batching.collation import collate, collating
from torch_nhwc.converting.conversion import channels_last, convert_
from torch_nhwc.converting.dropin import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format
from torch_nhwc.converting.report import Report
from torch_nhwc.cpp_extension import cmake_prefix_path, extra_cflags, extra_cuda_cflags, include_paths
from torch_nhwc.library import build_info, library_path
from torch_nhwc.ops import (
    convert_weight,
    convert_weight_,
    convert_weights,
    convert_weights_,
    copy_weight_,
    cpu_capability,
    lay_out_weights_,
    plan_weights,
)
from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.companions import CompanionRow
from torch_nhwc.planning.planner import plan
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.rows import Action, EntryRow, LayerRow, PlanRow
from torch_nhwc.reasons import Reason
from torch_nhwc.saving.saved import convert_saved
from torch_nhwc.saving.state_dicts import contiguous_checkpoints_, contiguous_state_dict, convert_state_dict
from torch_nhwc.stepping.guard import set_step_guard
from torch_nhwc.tracing.auditing import audit
from torch_nhwc.tracing.budget import assert_layout
from torch_nhwc.tracing.difference import TraceDiff
from torch_nhwc.tracing.record import Trace
from torch_nhwc.tracing.rows import Gain, Loss, MixedConvolution, Reorder, TracedModule, Unseen
from torch_nhwc.tracing.tracer import trace
from torch_nhwc.tuning.rows import TuningRow
from torch_nhwc.tuning.tuner import tune
from torch_nhwc.tuning.tunings import Tuning
from torch_nhwc.upkeep.checking import Deviation, check
from torch_nhwc.upkeep.restoring import align_, restore_
from torch_nhwc.verifying.verification import Verdict, Verification, VerificationRow
from torch_nhwc.verifying.verifier import verify
from torch_nhwc.version import __version__

__all__ = [
    "Action",
    "CompanionRow",
    "Deviation",
    "EntryRow",
    "Gain",
    "LayerRow",
    "Loss",
    "MixedConvolution",
    "Outcome",
    "Plan",
    "PlanRow",
    "Reason",
    "Reorder",
    "Report",
    "Trace",
    "TraceDiff",
    "TracedModule",
    "Tuning",
    "TuningRow",
    "Unseen",
    "Verdict",
    "Verification",
    "VerificationRow",
    "__version__",
    "align_",
    "assert_layout",
    "audit",
    "build_info",
    "channels_last",
    "check",
    "cmake_prefix_path",
    "collate",
    "collating",
    "contiguous_checkpoints_",
    "contiguous_state_dict",
    "convert_",
    "convert_conv2d_weight_memory_format",
    "convert_conv3d_weight_memory_format",
    "convert_saved",
    "convert_state_dict",
    "convert_weight",
    "convert_weight_",
    "convert_weights",
    "convert_weights_",
    "copy_weight_",
    "cpu_capability",
    "extra_cflags",
    "extra_cuda_cflags",
    "functional",
    "include_paths",
    "lay_out_weights_",
    "library_path",
    "plan",
    "plan_weights",
    "restore_",
    "set_step_guard",
    "to_channels_last",
    "trace",
    "tune",
    "verify",
]

_sharding.register_when_imported()
