"""The page: one self-contained HTML file that shows a model in order of execution, and tables that sort and filter.

What is on it comes as plain data from traces, plans, reports, tunings and verifications; nothing here knows a model.
"""
