"""Running models: once without a trace, many times against the clock, and comparing what comes out.

What a run is to show, and what a comparison decides, is the callers' affair: nothing here knows of sites or plans.
"""
