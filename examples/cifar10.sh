#!/usr/bin/env bash
# Certified training on CIFAR-10, l2 radius 36/255, from scratch: the mean of two networks that are Lipschitz by design and
# have no attention, at an image and its mirror image.
# Usage: examples/cifar10.sh DATASET   (a folder with train/ and test/ of class folders); some 170 minutes of CPU.
set -euo pipefail

data=$(cd "${1:?give a folder with train/ and test/}" && pwd)
out=${2:-cifar10-output}
mkdir -p "$out"
cd "$out"

flags=(--dataset "$data" --loss margin --epsilon 54/255 --stiefel-lr 0.03 --precision bf16
    --augment shift,warp,flip --force)
certvit init certvit_lip_pyramid_cifar10_base -o first-init.safetensors --force
certvit finetune first-init.safetensors "${flags[@]}" --epochs 100 -o first.safetensors
certvit init certvit_lip_pyramid_cifar10_base --seed 1 -o second-init.safetensors --force
certvit finetune second-init.safetensors "${flags[@]}" --seed 1 --epochs 100 -o second.safetensors
certvit init certvit_lip_pyramid_cifar10_base --member first.safetensors --member second.safetensors --arch-arg mirror=true \
    -o certified.safetensors --force
certvit certify certified.safetensors --dataset "$data" --split test -e 36/255 -e 72/255 --records certified.jsonl --force
certvit attack certified.safetensors --dataset "$data" --split test -e 36/255 -a pgd-50 -a margin-pgd-50 --limit 1000
certvit attack certified.safetensors --dataset "$data" --split test --only-certified certified.jsonl -a margin-pgd-50 \
    --limit 1000
