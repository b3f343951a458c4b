"""Layers whose weight stays as it is, and is converted on its way to the convolution, in each forward.

A layer gets there by an exchange of its class. Which layers do so, and why others cannot, is `planning`'s.
"""
