"""Finding the sites of a model: the convolution weights that a conversion is about, wherever they are.

What happens to a site is decided in `planning`; nothing here changes a model.
"""
