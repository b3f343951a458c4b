"""Deciding by measurement: which plan makes a model fastest on this machine, and how sure that is.

What a plan may hold, and applying one, belongs to `planning` and `converting`.
"""
