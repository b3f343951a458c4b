"""What a module is, before its convolutions matter: walking it, what wraps it, what computes its weights.

Which weights are to be converted is no question here: `finding` has the sites, and `planning` decides.
"""
