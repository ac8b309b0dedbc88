# Commands after torchrun are part of the job: if one fails, the job fails. They may run again, so they must be idempotent.
#
#     perdure run --nodes 2 -- bash examples/03-scripts/upload.sh
set -e
torchrun examples/01-first-job/train.py --steps "${STEPS:-2000}"
mkdir -p uploaded
# Every node runs these lines; the rename prevents a node from reading another one's partial file.
cp out/checkpoint.pt "uploaded/.checkpoint.$$"
mv "uploaded/.checkpoint.$$" uploaded/checkpoint.pt
