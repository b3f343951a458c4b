"""The command line: its commands, what they are given, the demo, and what a report of a problem needs.

Nothing else in the package imports this room; `commands` and `demo_table` need the extra `cli`, the others do without.
"""
