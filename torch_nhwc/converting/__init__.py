"""Carrying a plan out, all or nothing, and taking it back: the verbs that change models.

Nothing here decides what is to change: `planning` does. Looking after a model that was converted is `upkeep`'s.
"""
