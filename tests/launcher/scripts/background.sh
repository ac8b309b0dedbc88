#!/usr/bin/env bash
# As people start a training over ssh: in the background, so that it outlives the terminal.
nohup torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=192.0.2.1:1 train.py &
