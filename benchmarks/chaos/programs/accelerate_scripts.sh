#!/usr/bin/env bash
# Test programs of accelerate's own package, unmodified, one torchrun after the other.
set -euo pipefail
out=$1 rounds=$2
for round in $(seq "$rounds"); do
  for program in test_ops test_sync; do
    torchrun -m "accelerate.test_utils.scripts.$program"
    echo "$round $program" >>"$out/passed"
  done
done
touch "$out/all-passed"
