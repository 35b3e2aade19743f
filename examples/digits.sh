#!/usr/bin/env bash
# The whole chain on the 1,797 real digits that ship inside certvit: from a plain vision transformer that certifies nothing
# to one that certifies most images at l2 radius 0.5, each step one command. Copy it and change the names.
# Interrupted, it goes on where it was; to begin anew, delete its folder.
set -euo pipefail

out=${1:-demo-output}
radius=0.5
mkdir -p "$out"
cd "$out"

# Make FILE by a command, unless it is there and its training has ended.
step() {
    if [ ! -e "$1" ] || [ -e "${1%.safetensors}.state.safetensors" ]; then "${@:2}" -o "$1"; fi
}

# 1. A plain ViT (dot-product attention, LayerNorm), trained the usual way.
step init.safetensors certvit init certvit_vit_digits
step plain.safetensors certvit finetune init.safetensors --dataset digits --loss ce --epochs 45 --lr 2e-3 --noise 0.1 --resume

# 2. Lipschitz parts in place of the old ones, each fitted to what it replaces.
step adapted.safetensors certvit adapt plain.safetensors --goal certify --limit 2000 --norm fold --activation maxmin \
    --head 128,128

# 3. Lower spectral norms, same outputs on calibration images.
step constrained.safetensors certvit constrain adapted.safetensors --beta 0.01

# 4. Certified training: margins against the network's own bound, every matrix kept orthogonal.
step certified.safetensors certvit finetune constrained.safetensors --loss margin --epsilon $radius --augment warp \
    --epochs 80 --resume

# Judge each stage on the test images, which no step has seen: bound, certificates, attacks, with their evidence. There is
# time for all of them, so that every figure of the table below is about the same images.
for stage in plain adapted constrained certified; do
    [ -e $stage.audited.safetensors ] || certvit audit $stage.safetensors --quiet --method lipschitz -e $radius -a pgd-50 \
        -a margin-pgd-50 --limit 400 --time-budget 1h --report $stage.html -o $stage.audited.safetensors > $stage.txt
done
certvit attack certified.safetensors --quiet -a pgd-50 -e 0.1 -e 0.2 -e 0.3 -e 0.4 -e 0.5 -e 0.6 -e 0.7 -e 0.8 -e 1 -e 1.2 \
    --records certified.attack.jsonl --resume >/dev/null
certvit certify certified.safetensors --quiet -e 0.25 -e 0.5 -e 0.75 -e 1 -e 1.5 \
    --attack-records certified.attack.jsonl --plot certified.png --force

echo
certvit log plain.audited.safetensors adapted.audited.safetensors constrained.audited.safetensors certified.audited.safetensors
echo
sed '/^$/q' certified.txt
echo "Open $out/certified.html first: what is proven of the last network. The curve of proofs and attacks: $out/certified.png"
