#!/usr/bin/env bash
# One certvit command on several machines of a cluster, a process a GPU:  sbatch examples/slurm.sh
# ImageNet's validation images under noise. Submit the file again to continue where the time limit stopped it.
#SBATCH --job-name=certvit
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=certvit-%j.log
set -euo pipefail

CKPT=${CKPT:-vit_base_patch16_224}
IMAGES=${IMAGES:-/data/imagenet/val}
RECORDS=${RECORDS:-smoothed.jsonl}
PER_NODE=${PER_NODE:-8}

# the first machine of the job is where the processes meet
MEET=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --resume continues existing records, or begins new ones. A task that fails ends the job:
# torchrun has ended its processes already, and those of other machines would wait for it
srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$PER_NODE" \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MEET:29500" \
    --no-python certvit certify "$CKPT" --dataset "$IMAGES" --method smoothing --sigma 0.25 -n 100000 -e 0.25 -e 0.5 \
    --precision bf16 --batch-size 1024 --records "$RECORDS" --resume
