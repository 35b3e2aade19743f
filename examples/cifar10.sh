#!/usr/bin/env bash
# Certified training on CIFAR-10, l2 radius 36/255, from scratch: a network that is Lipschitz by design and has no attention.
# Usage: examples/cifar10.sh DATASET   (a folder with train/ and test/ of class folders); some 95 minutes on one core.
set -euo pipefail

data=$(cd "${1:?give a folder with train/ and test/}" && pwd)
out=${2:-cifar10-output}
mkdir -p "$out"
cd "$out"

certvit init certvit_lip_cifar10 -o init.safetensors --force
certvit finetune init.safetensors --dataset "$data" --loss margin --epsilon 36/255 --epochs 86 --stiefel-lr 0.03 \
    --precision bf16 --augment shift,warp,flip -o certified.safetensors --force
certvit certify certified.safetensors --dataset "$data" --split test -e 36/255 -e 72/255 --records certified.jsonl --force
certvit attack certified.safetensors --dataset "$data" --split test -e 36/255 -a pgd-50 -a margin-pgd-50 --limit 1000
certvit attack certified.safetensors --dataset "$data" --split test --only-certified certified.jsonl -a margin-pgd-50 \
    --limit 1000
