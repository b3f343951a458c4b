"""Running models: once without a trace, many times against the clock, and comparing what comes out.

What a run is to show is the caller's affair: nothing here knows of weights or formats.
"""
