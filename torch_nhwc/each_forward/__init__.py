"""Layers whose class was exchanged, so that they convert their weight on its way to the convolution, in each forward.

Which layers do so, and why others cannot, is decided in `planning`.
"""
