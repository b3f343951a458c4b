"""Run models: once without a trace, many times against the clock, and compare what comes out.

Nothing here knows of convolution weights or plans.
"""
