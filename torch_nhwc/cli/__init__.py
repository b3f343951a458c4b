"""The command line: its commands, the demo with the models that it knows, and what a report of a problem needs.

Nothing else in the package imports this room; `commands` needs the extra `cli`, the other files do without.
"""
