"""What frameworks need around a conversion: a module for each, which imports its framework.

Nothing else in the package imports this room, so `import torch_nhwc` needs torch alone.
"""
