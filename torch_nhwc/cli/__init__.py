"""The command line: plans, conversions, traces, measurements and comparisons of a user's model.

Everything that a command does is done by the public verbs.
"""
