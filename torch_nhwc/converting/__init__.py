"""Carrying a plan out, all or nothing, and taking it back: the verbs that change models.

What is to change is decided in `planning`; looking after a model that was converted belongs to `upkeep`.
"""
