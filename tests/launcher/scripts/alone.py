"""Trains without a place, as a rank of a launch that bypassed us would."""

import os
import time

print("rank", os.environ["RANK"], "trains alone", flush=True)
time.sleep(3600)
