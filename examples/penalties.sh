#!/usr/bin/env bash
# MSVP against none, SAM against none, on MNIST with a plain ViT (two blocks, width 64) from scratch: equal numbers of gradients
# (SAM takes two a step, so it gets half the epochs), two seeds. Attacked on 1,000 test images, each attack alone.
# Usage: examples/penalties.sh DATA_DIR [OUT]   (the folder that holds MNIST/raw)
set -euo pipefail

data=$(cd "${1:?give the folder that holds MNIST/raw}" && pwd)
out=${2:-penalties-output}
mkdir -p "$out"
cd "$out"

for seed in 0 1; do
    certvit init certvit_vit_mnist --arch-arg depth=2 --arch-arg embed_dim=64 --seed "$seed" -o "init.$seed.safetensors" --force --quiet
    while read -r name options; do
        # shellcheck disable=SC2086 (options are several words)
        certvit finetune "init.$seed.safetensors" --dataset torch/mnist --data-dir "$data" --loss ce --batch-size 128 --lr 0.001 \
            --seed "$seed" $options -o "$name.$seed.safetensors" --force --quiet > "$name.$seed.log"
        certvit attack "$name.$seed.safetensors" --data-dir "$data" --limit 1000 --preset cauchy --json --quiet \
            > "$name.$seed.cauchy.json"
        certvit attack "$name.$seed.safetensors" --data-dir "$data" --limit 1000 --norm linf -e 2/255 -e 8/255 -e 16/255 -e 32/255 -a fgsm -a pgd-20 \
            --independent --json --quiet > "$name.$seed.linf.json"
        certvit attack "$name.$seed.safetensors" --data-dir "$data" --limit 1000 -e 0.5 -e 1.0 -e 1.58 -a pgd-20 -a margin-pgd-40 --json --quiet \
            > "$name.$seed.l2.json"
        certvit lipschitz "$name.$seed.safetensors" --no-estimate --json --quiet > "$name.$seed.bound.json"
    done <<'VARIANTS'
none --epochs 4
msvp1e-4 --epochs 4 --msvp 1e-4
msvp1e-3 --epochs 4 --msvp 1e-3
msvp1e-2 --epochs 4 --msvp 1e-2
sam0.05 --epochs 2 --sam 0.05
sam0.1 --epochs 2 --sam 0.1
VARIANTS
done
