"""Deciding what is to happen to every site of a model, and to what follows its weight, before anything is touched.

Carrying it out belongs to `converting`; nothing here writes to a tensor or a module.
"""
