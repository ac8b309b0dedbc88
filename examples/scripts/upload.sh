# What follows torchrun is part of the job, which fails if this fails. It may run again, so it must be repeatable.
#
#     perdure run --nodes 2 -- bash examples/scripts/upload.sh
set -e
torchrun examples/train.py --steps "${STEPS:-2000}"
mkdir -p uploaded
# Every node runs this line: none may see the half of another one's file.
cp out/checkpoint.pt "uploaded/.checkpoint.$$"
mv "uploaded/.checkpoint.$$" uploaded/checkpoint.pt
