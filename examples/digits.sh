#!/usr/bin/env bash
# The whole chain on the 1,797 real digits that ship inside certvit: from a plain vision transformer that certifies nothing
# to one that certifies most images at l2 radius 0.5, each step one command. Copy it and change the names.
set -euo pipefail

out=${1:-demo-output}
radius=0.5
mkdir -p "$out"
cd "$out"
rm -f ./*.safetensors ./*.jsonl ./*.png ./*.html ./*.txt

# 1. A plain ViT (dot-product attention, LayerNorm), trained the usual way.
certvit init certvit_vit_digits -o init.safetensors
certvit finetune init.safetensors --dataset digits --loss ce --epochs 45 --lr 2e-3 --noise 0.1 -o plain.safetensors

# 2. Lipschitz parts in place of the old ones, each fitted to what it replaces.
certvit adapt plain.safetensors --goal certify --limit 2000 --norm fold --activation maxmin --head 128,128 -o adapted.safetensors

# 3. Lower spectral norms, same outputs on calibration images.
certvit constrain adapted.safetensors --beta 0.01 -o constrained.safetensors

# 4. Certified training: margins against the network's own bound, every matrix kept orthogonal.
certvit finetune constrained.safetensors --loss margin --epsilon $radius --augment warp --epochs 80 \
    -o certified.safetensors

# Judge each stage on the test images, which no step has seen: bound, certificates, attacks, with their evidence.
for stage in plain adapted constrained certified; do
    certvit audit $stage.safetensors --quiet --method lipschitz -e $radius -a pgd-50 -a margin-pgd-50 --limit 400 \
        --report $stage.html -o $stage.audited.safetensors > $stage.txt
done
certvit attack certified.safetensors --quiet -a pgd-50 -e 0.1 -e 0.2 -e 0.3 -e 0.4 -e 0.5 -e 0.6 -e 0.7 -e 0.8 -e 1 -e 1.2 \
    --records certified.attack.jsonl >/dev/null
certvit certify certified.safetensors --quiet -e 0.25 -e 0.5 -e 0.75 -e 1 -e 1.5 \
    --attack-records certified.attack.jsonl --plot certified.png

echo
certvit log plain.audited.safetensors adapted.audited.safetensors constrained.audited.safetensors certified.audited.safetensors
echo
sed '/^$/q' certified.txt
echo "Open $out/certified.html first: what is proven of the last network. The curve of proofs and attacks: $out/certified.png"
