"""Trains without rank variables, like a rank of a launch that bypasses Perdure."""

import os
import time

print("rank", os.environ["RANK"], "trains alone", flush=True)
time.sleep(3600)
