"""The history of jobs, which outlives Temporal's retention: see docs/history.md.

`settings` says where it is kept, `schema` and `migrations` how, `records` makes rows of what a job answers, `store`
writes them, `answers` reads them, and `activities` has what workers serve.
"""
