"""Spectral norms of attention's weights: the mean over blocks of |W_q|, |W_k| and |W_v|, as JSON.

python -m benchmarks.tables.norms net.safetensors
"""

import json
import sys

import torch
from safetensors.torch import load_file


def mean_norm(path: str) -> float:
    """Return the mean spectral norm of the matrices in qkv, of singular values in float64."""
    norms = [
        float(torch.linalg.matrix_norm(matrix.double(), 2))
        for name, weight in load_file(path).items()
        if name.endswith("attn.qkv.weight")
        for matrix in weight.chunk(3)
    ]
    return sum(norms) / len(norms)


if __name__ == "__main__":
    print(json.dumps({"norms": mean_norm(sys.argv[1])}))
