# Runs torchrun once per seed. A node that is replaced during the third run does not repeat the first two.
#
#     perdure run --nodes 2 -- bash examples/03-scripts/seeds.sh
set -e
for seed in 0 1 2; do
  torchrun examples/01-first-job/train.py --seed "$seed" --out "out/seed-$seed" --steps "${STEPS:-2000}"
done
