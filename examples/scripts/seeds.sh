# One torchrun for each seed. A node that is replaced in the third one trains the first two no more.
#
#     perdure run --nodes 2 -- bash examples/scripts/seeds.sh
set -e
for seed in 0 1 2; do
  torchrun examples/train.py --seed "$seed" --out "out/seed-$seed" --steps "${STEPS:-2000}"
done
