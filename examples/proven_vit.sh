#!/usr/bin/env bash
# An ordinary vision transformer that is proven: softmax attention of weight 1, LayerNorm and GELU stay as timm has them, on the
# 1,797 real digits that ship inside certvit. Some 20 minutes of one core.
# Usage: examples/proven_vit.sh [OUT]
set -euo pipefail

out=${1:-proven-output}
mkdir -p "$out"
cd "$out"

# 1. A plain ViT of two blocks, trained the usual way: nothing useful can be proven of it.
certvit init certvit_vit_digits --arch-arg patch_size=4 --arch-arg embed_dim=48 --arch-arg mlp_ratio=0.125 -o init.safetensors --force
certvit finetune init.safetensors --dataset digits --loss ce --lr 3e-3 --epochs 30 -o plain.safetensors --force
certvit certify plain.safetensors --method local -e 0.1 --limit 3

# 2. The same network from the same start with the enclosure penalty, on attacked images: what local certificates lose at
#    LayerNorm and GELU becomes small. Softmax counts 3 %, so that attention stays at work. Warped images keep it accurate.
certvit finetune init.safetensors --dataset digits --loss ce --lr 3e-3 --clip-grad 1 --warmup 0.15 --batch-size 64 \
    --augment warp --epochs 200 --adversarial pgd --attack-norm l2 --attack-epsilon 0.3 -e 0.25 --attack-steps 2 \
    --attack-ramp 0.5 --enclosure-penalty 0.3,0.009,0.9 -o tight.safetensors --force

# 3. Certified training: the worst logits of an enclosure of each image's neighbourhood, at a growing radius; then twice
#    again, farther and with more weight.
certvit finetune tight.safetensors --loss local -e 0.45 --ramp 0.6 --lr 1e-3 --clip-grad 1 --warmup 0.15 --batch-size 64 \
    --augment warp --epochs 22 --adversarial pgd --attack-norm l2 --attack-epsilon 0.3 --attack-steps 2 --attack-ramp 0.5 \
    -o first.safetensors --force
certvit finetune first.safetensors --loss local -e 0.5 --ramp 0.2 --lr 7e-4 --clip-grad 1 --warmup 0.1 --batch-size 64 \
    --augment warp --epochs 40 --adversarial pgd --attack-norm l2 --attack-epsilon 0.3 --attack-steps 2 --attack-ramp 0.1 \
    --worst-weight 0.3 -o second.safetensors --force
certvit finetune second.safetensors --loss local -e 0.55 --ramp 0.2 --lr 7e-4 --clip-grad 1 --warmup 0.1 --batch-size 64 \
    --augment warp --epochs 60 --adversarial pgd --attack-norm l2 --attack-epsilon 0.4 --attack-steps 2 --attack-ramp 0.1 \
    --worst-weight 0.4 -o proven.safetensors --force

# 4. Attacks and proofs on test images, which no step has seen; then attacks at each image's own certified radius.
certvit attack proven.safetensors -a pgd-50 -a margin-pgd-50 -e 0.25 -e 0.5 --limit 20 --records attack.jsonl --force
certvit certify proven.safetensors --method local -e 0.25 -e 0.5 --limit 20 --records certified.jsonl --force \
    --attack-records attack.jsonl --plot proven.png
certvit attack proven.safetensors --only-certified certified.jsonl -a margin-pgd-50

# 5. The answer in words, and a page.
certvit audit proven.safetensors --method local -e 0.25 -e 0.5 -a margin-pgd-50 --limit 20 --time-budget 40s \
    --report proven.html
echo "Open $out/proven.html first; the curve of proofs and attacks: $out/proven.png"
