#!/usr/bin/env bash
# Proofs against stickers for a published ViT-Tiny, on Imagenette's ten classes: trained on parts of images for some minutes of
# one core, then certified against every patch of 32 x 32 pixels, by double masking and by voting, and put to use.
# Usage: examples/patch.sh IMAGES [CKPT] [OUT]   (IMAGES holds train/ and val/, each with a folder a class, named by synset)
set -euo pipefail

images=$(cd "${1:?give the folder that holds train and val}" && pwd)
ckpt=${2:-vit_tiny_patch16_224}
if [ -e "$ckpt" ]; then ckpt=$(realpath "$ckpt"); fi
out=${3:-patch-output}
mkdir -p "$out"
cd "$out"

# 1. Bands of three token columns in two batches of three, else without two of the masks that certify: only the tokens that
#    are seen run through the network. Epochs are compared on a tenth of the training images.
certvit finetune "$ckpt" --dataset "$images/train" --loss ce --augment flip,bands:3,bands:3,cutout-random:2x96 \
    --lr 1e-4 --batch-size 32 --steps 120 -o patch.safetensors --force

# 2. The validation images, once, by both procedures.
proof=(--dataset "$images/val" --limit 200 --method patch --patch 32)
certvit certify patch.safetensors "${proof[@]}" --procedure voting --records voting.jsonl --force
certvit certify patch.safetensors "${proof[@]}" --records masks.jsonl --force

# 3. The classifier that was certified, on image files: which patches cannot change an answer.
certvit predict patch.safetensors "$images"/val/n03445777/*1.JPEG --defence patch --patch 32 --prove
