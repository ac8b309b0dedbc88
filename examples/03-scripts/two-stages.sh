# Runs torchrun twice. A node that is replaced during the second run does not repeat the first one.
#
#     perdure run --nodes 2 -- bash examples/03-scripts/two-stages.sh
set -e
torchrun examples/01-first-job/train.py --out out/narrow --width 64 --steps "${STEPS:-2000}"
echo "the narrow model is trained"
torchrun examples/01-first-job/train.py --out out/wide --width 256 --steps "${STEPS:-2000}"
