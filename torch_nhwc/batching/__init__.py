"""Batches for a model: samples collated into channels-last memory, and batches that are there brought into it.

Which batches are images or volumes, and how they lie, is decided here; `entries` brings the inputs of a model.
"""
