"""Jobs from Python: submits them, changes them, and reads their status, results and logs.

`perdure.Client` and `perdure.SyncClient` are its public face.
"""
