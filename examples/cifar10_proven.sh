#!/usr/bin/env bash
# An ordinary vision transformer of CIFAR-10 that is proven image by image, beside networks without attention.
# Usage: examples/cifar10_proven.sh DATASET [OUT]   (train/ and test/ of class folders); some half an hour of one core.
set -euo pipefail

data=$(cd "${1:?give a folder with train/ and test/}" && pwd)
out=${2:-cifar10-proven-output}
benchmarks=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
cd "$out"

# 1. Two blocks of softmax attention, LayerNorm and GELU; 16 patches of 8 x 8 pixels, width 48.
certvit init vit_tiny_patch16_224 --arch-arg img_size=32 --arch-arg patch_size=8 --arch-arg embed_dim=48 --arch-arg depth=2 \
    --arch-arg num_heads=4 --arch-arg mlp_ratio=2 --arch-arg num_classes=10 --mean 0.49,0.48,0.45 --std 0.25,0.24,0.26 \
    -o init.safetensors --force

# 2. Attacked images and the enclosure penalty.
certvit finetune init.safetensors --dataset "$data" --loss ce --lr 3e-3 --clip-grad 1 --warmup 0.1 --batch-size 128 \
    --augment flip --epochs 9 --adversarial pgd --attack-norm l2 --attack-epsilon 0.25 -e 0.141 --attack-steps 2 \
    --attack-ramp 0.5 --enclosure-penalty 0.1,0.01,0.1 -o proven.safetensors --force

# 3. The test set, once, attacks within what is proven, and the networks without attention.
certvit certify proven.safetensors --dataset "$data" --split test --method local -e 36/255 --limit 200 \
    --records certified.jsonl --force
certvit attack proven.safetensors --dataset "$data" --split test --only-certified certified.jsonl -a margin-pgd-50
export PYTHONPATH=$benchmarks
controls=(proven.safetensors --dataset "$data" --limit 200 --radius 0.141177 --augment crop --augment flip --batch-size 128
    --attack-epsilon 0.25 --attack-ramp 0.5 --warmup 0.1 --clip-grad 1)
python -m benchmarks.proven_vit "${controls[@]}" --epochs 25
python -m benchmarks.proven_vit "${controls[@]}" --epochs 30 --filters 16  # as many seconds as the network above
