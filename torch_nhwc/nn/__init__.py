"""Layers that keep channels-last or convert their weight in each forward, and the hooks that stay on modules.

Nothing in here decides what changes in a model, or reports it: `planning` and `converting` do.
"""
