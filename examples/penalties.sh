#!/usr/bin/env bash
# MSVP and SAM against neither, on MNIST with a plain ViT (two blocks, width 64) from scratch: equal numbers of gradients
# (SAM takes two a step, so it gets half the epochs), two seeds. Attacked on 500 test images.
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
        for norm in l2 linf; do
            radii="-e 0.5 -e 1"
            [ "$norm" = linf ] && radii="-e 16/255 -e 32/255"
            # shellcheck disable=SC2086
            certvit attack "$name.$seed.safetensors" --data-dir "$data" --limit 500 --norm "$norm" $radii -a pgd-20 -a margin-pgd \
                --json --quiet > "$name.$seed.$norm.json"
        done
        certvit lipschitz "$name.$seed.safetensors" --no-estimate --json --quiet > "$name.$seed.bound.json"
    done <<'VARIANTS'
none --epochs 4
msvp1e-3 --epochs 4 --msvp 1e-3
msvp1e-2 --epochs 4 --msvp 1e-2
sam0.05 --epochs 2 --sam 0.05
VARIANTS
done
