#!/usr/bin/env bash
# Attention at work, MNIST at l2 radius 1.58: a network whose tokens meet only in hard attention (sort), and the same with
# nothing in its place (none), on the same budget. `soft` is a third: softmax attention of pairs.
# Usage: examples/mnist_attention.sh DATA_DIR [OUT]   (DATA_DIR holds MNIST/raw); some half an hour on one core.
set -euo pipefail

data=$(cd "${1:?give the folder that holds MNIST/raw}" && pwd)
out=${2:-mnist-attention-output}
mkdir -p "$out"
cd "$out"

for mixing in sort none; do
    certvit init certvit_lip_attention_mnist --arch-arg mixing=$mixing -o $mixing.init.safetensors --force
    certvit finetune $mixing.init.safetensors --dataset torch/mnist --data-dir "$data" --loss margin --epsilon 1.58 \
        --optimiser stiefel --lr 0.01 --stiefel-lr 0.03 --ema 0.99 --augment warp --epochs 26 --batch-size 512 \
        -o $mixing.safetensors --force
    certvit certify $mixing.safetensors --data-dir "$data" --split test -e 1.58
    certvit attack $mixing.safetensors --data-dir "$data" --split test -e 1.58 -a pgd-50 --limit 1000
done
