"""Has the interpreter find, after its own packages, those of the folder that BENCH_PACKAGES names."""

import os
import sys

if "BENCH_PACKAGES" in os.environ:
    sys.path.append(os.environ["BENCH_PACKAGES"])
