"""Seeing where a model loses channels-last: every operator that runs is looked at, and what it lost is told by module.

Nothing here changes a model, and what to do about a loss is decided elsewhere.
"""
