"""The format and what is kept on disk: state dicts for tools that take contiguous tensors only, and converted ones.

Bringing a model's own format back after loading is `upkeep`'s.
"""
