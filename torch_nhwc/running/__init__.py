"""Running models: how long jobs take, and what their outputs and weights are compared by.

What the jobs are, and what a comparison decides, is the callers' affair: nothing of the package but this is imported.
"""
