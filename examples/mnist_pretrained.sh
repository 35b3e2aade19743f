#!/usr/bin/env bash
# Certified training on MNIST, l2 radius 1.58, from a plain pre-trained ViT: adapt, constrain, finetune; then the same
# network from random weights on the same budget, to measure the gain from pre-training. Attention ends with almost
# no weight (its bound is loose): the MaxMin head over all tokens does the work.
# Usage: examples/mnist_pretrained.sh DATA_DIR [OUT]   (DATA_DIR holds MNIST/raw); some twenty-five minutes on one core.
set -euo pipefail

data=$(cd "${1:?give the folder that holds MNIST/raw}" && pwd)
out=${2:-mnist-pretrained-output}
mkdir -p "$out"
cd "$out"
images=(--dataset torch/mnist --data-dir "$data")
parts=(--goal certify --limit 2000 --norm fold --residual weighted --activation maxmin --head 512,512,256)
certified=(--loss margin --epsilon 1.58 --epochs 12 --batch-size 256 --stiefel-lr 0.05)

# 1. A plain ViT (LayerNorm, dot-product attention, GELU), trained the usual way.
certvit init certvit_vit_mnist --arch-arg depth=2 --arch-arg embed_dim=64 -o init.safetensors --force
certvit finetune init.safetensors "${images[@]}" --loss ce --epochs 3 --lr 2e-3 -o plain.safetensors --force

# 2. Lipschitz parts fitted to the old ones, lower spectral norms, certified training.
certvit adapt plain.safetensors "${images[@]}" "${parts[@]}" -o adapted.safetensors --force
certvit constrain adapted.safetensors "${images[@]}" --beta 0.01 -o constrained.safetensors --force
certvit finetune constrained.safetensors "${images[@]}" "${certified[@]}" -o certified.safetensors --force

# 3. The same parts around random weights, trained alike.
certvit adapt init.safetensors "${images[@]}" "${parts[@]}" --epochs 0 --distill 0 -o blank.safetensors --force
certvit finetune blank.safetensors "${images[@]}" "${certified[@]}" -o scratch.safetensors --force

# 4. The test set, once.
for net in certified scratch; do
    certvit certify $net.safetensors --data-dir "$data" --split test -e 1.58
    certvit attack $net.safetensors --data-dir "$data" --split test -e 1.58 -a pgd-50 --limit 1000
done
