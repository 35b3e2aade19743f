#!/usr/bin/env bash
# An ordinary vision transformer of MNIST that is proven image by image, beside a linear network and an MLP.
# Usage: examples/mnist_proven.sh DATA_DIR [OUT]   (DATA_DIR holds MNIST/raw); some half an hour of one core.
set -euo pipefail

data=$(cd "${1:?give the folder that holds MNIST/raw}" && pwd)
out=${2:-mnist-proven-output}
benchmarks=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
cd "$out"
images=(--dataset torch/mnist --data-dir "$data")

# 1. Two blocks, four patches of 14 x 14 pixels, width 32, an MLP of 16 hidden units.
certvit init certvit_vit_digits --arch-arg img_size=28 --arch-arg patch_size=14 --arch-arg embed_dim=32 \
    --arch-arg mlp_ratio=0.5 -o init.safetensors --force

# 2. Attacked images and the enclosure penalty, then certified training in small steps.
certvit finetune init.safetensors "${images[@]}" --loss ce --lr 3e-3 --clip-grad 1 --warmup 0.15 --batch-size 128 \
    --epochs 12 --adversarial pgd --attack-norm l2 --attack-epsilon 0.7 -e 0.25 --attack-steps 2 --attack-ramp 0.5 \
    --enclosure-penalty 0.1,0.03,0.1 -o tight.safetensors --force
certvit finetune tight.safetensors "${images[@]}" --loss local -e 0.5 --ramp 0.6 --lr 8e-4 --clip-grad 1 --warmup 0.15 \
    --batch-size 256 --steps 1300 --worst-weight 0.2 --enclosed 12 --adversarial pgd --attack-norm l2 \
    --attack-epsilon 0.5 --attack-steps 2 --attack-ramp 0.5 -o proven.safetensors --force

# 3. The test set, once, and the networks without attention.
certvit certify proven.safetensors --data-dir "$data" --method local -e 0.25 -e 0.5 --limit 100
PYTHONPATH=$benchmarks python -m benchmarks.proven_vit proven.safetensors "${images[@]}" --epochs 5 --batch-size 128 \
    --attack-epsilon 0.5
