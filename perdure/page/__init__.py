"""The page of `perdure ui`: jobs in a browser, for people who look at several things at once.

It reads by the same client as the command line, in the same words, decides nothing, and keeps nothing: what it draws
over time are the job's own records.
"""
