"""What is looked after while a converted model trains: how gradients and state lie when an optimizer steps or loads.

Who follows a weight is known from `planning`; what a conversion itself changes belongs to `converting`.
"""
