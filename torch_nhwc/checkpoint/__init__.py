"""State dicts, contiguous or in the format of a plan, and saved files."""

from torch_nhwc.checkpoint.saved_files import convert_saved
from torch_nhwc.checkpoint.state_dicts import contiguous_checkpoints_, contiguous_state_dict, convert_state_dict

__all__ = ["contiguous_checkpoints_", "contiguous_state_dict", "convert_saved", "convert_state_dict"]
