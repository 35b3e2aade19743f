#!/usr/bin/env bash
# A vision transformer beside networks without attention: the class is the largest of four digits. Three seeds of each.
# Usage: examples/four_digits.sh [OUT]; some 65 minutes of one core, most of it certificates.
set -euo pipefail

out=${1:-four-digits-output}
benchmarks=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
cd "$out"
export PYTHONPATH=$benchmarks

# 1. Four of the real digits side by side, 16 x 16 pixels.
python -m benchmarks.four_digits images

for seed in 0 1 2; do
    # 2. Two blocks, four patches of 8 x 8, width 32, trained on attacked, warped images with the enclosure penalty.
    certvit init certvit_vit_digits --seed $seed --arch-arg img_size=16 --arch-arg patch_size=8 --arch-arg embed_dim=32 \
        --arch-arg mlp_ratio=1 -o init.safetensors --force
    certvit finetune init.safetensors --dataset images --loss ce --lr 3e-3 --clip-grad 1 --warmup 0.15 --batch-size 64 \
        --augment warp --epochs 20 --adversarial pgd --attack-norm l2 --attack-epsilon 0.3 -e 0.25 --attack-steps 2 \
        --attack-ramp 0.5 --enclosure-penalty 0.1,0.003,0.3 --seed $seed -o four-$seed.safetensors --force

    # 3. The test set, once: this network, one that reads the four digits with the same weights, a linear one and an MLP.
    certvit certify four-$seed.safetensors --dataset images --method local -e 0.1 -e 0.141 --limit 600
    controls=(four-$seed.safetensors --dataset images --limit 600 --seed $seed --radius 0.1 --radius 0.141 --augment warp
        --attack-epsilon 0.3 --attack-ramp 0.5 --warmup 0.15 --clip-grad 1)
    python -m benchmarks.proven_vit "${controls[@]}" --epochs 40 --patch 8
    python -m benchmarks.proven_vit "${controls[@]}" --epochs 160
done
