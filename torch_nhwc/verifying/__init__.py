"""Proving that numbers held: two models are compared layer by layer, each layer on the input that the reference had.

It knows of no plan and no report; a conversion that is to prove itself calls it from above.
"""
