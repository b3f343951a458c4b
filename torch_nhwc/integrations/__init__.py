"""What frameworks need in addition to a conversion: a module for each, which imports its framework.

Nothing else in the package imports this room, so that `import torch_nhwc` needs torch alone.
"""
