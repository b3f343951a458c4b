"""Layers that keep channels-last: which classes lose on it, what stands in for each, and the exchange of the class.

What is exchanged in a conversion is decided in `planning` and done in `converting`; nothing here decides or reports.
"""
