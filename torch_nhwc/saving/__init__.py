"""The format and what is kept on disk: saved models; state dicts, converted, or contiguous for tools that ask for it.

Bringing a model's own format back after loading is `upkeep`'s.
"""
