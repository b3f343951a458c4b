"""Prove that a model computes what another one does: layer by layer on the reference's inputs, and as a whole.

Nothing here knows of plans: a conversion is verified after it, and reverted where something differs.
"""

from torch_nhwc.verifying.verification import Verdict, Verification, VerificationRow
from torch_nhwc.verifying.verifier import verify

__all__ = ["Verdict", "Verification", "VerificationRow", "verify"]
