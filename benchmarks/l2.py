"""Why tied L2 attention cannot stand for a trained head: each property that it lacks, taken away one after the other.

    python benchmarks/l2.py CKPT --dataset DIR [--images 16]

A trained head has logits scale (W_Q u_i + b_Q).(W_K u_j + b_K) for normed tokens u; L2 attention has -|W (u_i - u_j)|^2 /
sqrt(dh), and the values are W u. For each block, all heads: the relative error of the attention's output on images of
their own, the original tokens going in and the output map fitted by least squares, when the heads lose, one after
the other,

key bias       b_Q.W_K u_j, by which a token is attended to whoever asks: only differences of tokens enter the L2 logits
antisymmetry   half of W_Q^T W_K - W_K^T W_Q: distances are symmetric
negative part  the directions in which alike tokens repel each other: a squared distance has none
own norm       |W u_j|^2 is subtracted, which a dot product does not do
values         they are W u, that is the queries
bias back      (given back) the key bias, as if -|W (u_i - u_j) + s|^2 were allowed: a query that is shifted by s

Beside them, a head: the share of |W_Q^T W_K|^2 that is symmetric, the share of that which is positive, and the mean weight
that a token gives itself, before and after: at distance 0 none is nearer.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.start import LeastSquares
from certcli.images import datasets
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.nn.attention import tied_query
from certcli.nn.attention_weights import AttentionWeights

STAGES = ("key bias", "antisymmetry", "negative part", "own norm", "values", "bias back")


class Head:
    """One head's maps in float32, and what is left of its logits after each loss: tokens (b, n, d) -> (b, n, n)."""

    def __init__(self, weights: AttentionWeights, number: int) -> None:
        self.query, self.key, self.value = (
            weights.head(each, number).float() for each in (weights.query, weights.key, weights.value)
        )
        rows = slice(number * weights.head_dim, (number + 1) * weights.head_dim)
        zero = torch.zeros(weights.head_dim)
        self.query_bias, self.key_bias, self.value_bias = (
            zero if each is None else each[rows].float()
            for each in (weights.query_bias, weights.key_bias, weights.value_bias)
        )
        self.scale, self.tied = weights.scale, tied_query(weights, number).float()
        self.product = self.scale * self.query.T @ self.key

    def whole(self, u: Tensor) -> Tensor:
        return self.scale * (u @ self.query.T + self.query_bias) @ (u @ self.key.T + self.key_bias).mT

    def without_bias(self, u: Tensor) -> Tensor:
        return u @ self.product @ u.mT

    def symmetric(self, u: Tensor) -> Tensor:
        return u @ ((self.product + self.product.T) / 2) @ u.mT

    def positive(self, u: Tensor) -> Tensor:
        q = u @ self.tied.T
        return 2 / math.sqrt(len(self.tied)) * q @ q.mT

    def distance(self, u: Tensor) -> Tensor:
        q = u @ self.tied.T
        return self.positive(u) - q.square().sum(-1).unsqueeze(-2) / math.sqrt(len(self.tied))

    def shifted(self, u: Tensor) -> Tensor:
        return self.distance(u) + self.scale * (u @ self.key.T @ self.query_bias).unsqueeze(-2)

    def shares(self, u: Tensor) -> list[float]:
        half = (self.product + self.product.T) / 2
        positive = torch.linalg.eigvalsh(half.double()).clamp_min(0).norm()
        own = [each(u).softmax(-1).diagonal(dim1=-2, dim2=-1).mean() for each in (self.whole, self.distance)]
        return [float(x) for x in ((half.norm() / self.product.norm()) ** 2, (positive / half.norm()) ** 2, *own)]


def mixed(heads: list[Head], u: Tensor, logits: str, tied: bool = False) -> Tensor:
    """The output map's input: (b, n, d) -> (b, n, h dh)."""
    found = []
    for head in heads:
        values = u @ head.tied.T if tied else u @ head.value.T + head.value_bias
        found.append(getattr(head, logits)(u).softmax(-1) @ values)
    return torch.cat(found, dim=-1)


def block(attention: nn.Module, fitted: Tensor, judged: Tensor) -> tuple[list[float], list[Head]]:
    """The output errors of STAGES on the judging images' tokens."""
    weights = AttentionWeights.of(attention)
    heads = [Head(weights, number) for number in range(weights.num_heads)]
    goal, learnt = attention(judged), attention(fitted)

    def refitted(logits: str, tied: bool) -> float:
        features, layer = (
            mixed(heads, fitted, logits, tied),
            nn.Linear(weights.proj_weight.shape[1], goal.shape[-1]),
        )
        solver = LeastSquares(layer.in_features, layer.out_features, goal.device)
        solver.add(features.flatten(0, -2), learnt.flatten(0, -2))
        solver.solve_into(layer, 1e-4)
        return float((layer(mixed(heads, judged, logits, tied)) - goal).norm() / goal.norm())

    losses = ("without_bias", "symmetric", "positive", "distance")
    return [*(refitted(each, False) for each in losses), refitted("distance", True), refitted("shifted", True)], heads


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--images", type=int, default=16, help="to fit to; as many others judge")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(arguments.checkpoint)
    model = build.load(checkpoint)
    images = datasets.load(arguments.dataset, checkpoint.record.input, "train", arguments.data_dir).limit(
        2 * arguments.images, 0
    )
    pixels = images.tensors()[0]
    seen: list[Tensor] = []
    net: Any = model.net
    for part in net.blocks:
        part.attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(pixels)
    tokens = list(seen)
    print(f"| block | {' | '.join(STAGES)} |\n|{'---|' * (1 + len(STAGES))}")
    rows = []
    for number, (part, u) in enumerate(zip(net.blocks, tokens, strict=True)):
        errors, heads = block(part.attn, u[0::2], u[1::2])
        rows.append(errors)
        print(f"| {number} | {' | '.join(f'{100 * each:.0f}' for each in errors)} |", flush=True)
        for head in heads:
            print(
                "    symmetric {:.2f}, of it positive {:.2f}, own weight {:.3f} -> {:.3f}".format(*head.shares(u[1::2]))
            )
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    print(f"| mean | {' | '.join(f'{100 * each:.0f}' for each in means)} |")


if __name__ == "__main__":
    main()
