"""A rank that only runs another program, and does not handle signals."""

import subprocess
import sys

sys.exit(subprocess.call([sys.executable, "-u", *sys.argv[1:]]))
