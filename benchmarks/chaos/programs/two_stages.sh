#!/usr/bin/env bash
# Pretrains, fine-tunes the result, and exports it: two torchruns and a final step in one command.
set -euo pipefail
out=$1 epochs=$2 here=$(dirname "$0")
mkdir -p "$out/pretrain" "$out/finetune"
torchrun "$here/ddp_env.py" "$out/pretrain" "$epochs"
echo "pretrained" >>"$out/progress"
torchrun "$here/ddp_env.py" "$out/finetune" "$epochs" "$out/pretrain/snapshot.pt"
echo "fine-tuned" >>"$out/progress"
cp "$out/finetune/snapshot.pt" "$out/exported.$$" && mv "$out/exported.$$" "$out/exported.pt"
