#!/usr/bin/env bash
# As scripts of clusters do: the place comes from variables that only the cluster sets.
set -euo pipefail
torchrun --nnodes="${NNODES:-2}" --nproc-per-node=1 --rdzv-backend=static --node-rank="${NODE_RANK:-0}" \
  --master-addr="${MASTER_ADDR:-192.0.2.1}" --master-port="${MASTER_PORT:-29500}" train.py
