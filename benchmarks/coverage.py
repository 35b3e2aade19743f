"""How often smoothing certifies too much, on a real network: python benchmarks/coverage.py CKPT [--alpha 0.05].

The probability p of each image's class is known from many draws; CERTIFY is then run again and again with few, each time
with a seed of its own. A run is wrong when it certifies beyond sigma Phi^-1(p), or another class. At most a share alpha of
all runs may be; of those that certify at all, the share is told too.
"""

import argparse
from dataclasses import replace

import torch
from scipy import stats

from certcli.certify.smoothing.functions import classifier
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.options import Smoothing
from certcli.cli.shared.inputs import evaluation_images
from certcli.cli.shared.output import Sink
from certcli.models.open import open_checkpoint

TRUTH = 1 << 40  # a seed that no run has


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ckpt")
    parser.add_argument("--dataset")
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--truth", type=int, default=10_000)
    parser.add_argument("--sigma", type=float, default=0.2)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--enough", type=float)
    given = parser.parse_args()
    checkpoint, device = open_checkpoint(given.ckpt), torch.device("cpu")
    images = evaluation_images(checkpoint.record, given.dataset, None, None, given.images, 0, Sink(True, True))
    pixels, labels = images.tensors()
    classify, classes = classifier(checkpoint, device, "float32"), checkpoint.record.classes
    settings = Smoothing(given.sigma, 20, given.samples, given.alpha, given.enough, batch_size=1024)
    certifier = SmoothingCertifier(classify, classes, settings, device)
    every, indices = range(len(images)), images.indices.tolist()
    counts = certifier._count(indices, pixels, dict.fromkeys(every, (0, given.truth)), TRUTH)
    shares = counts.double() / given.truth
    wrong = certified = 0
    for seed in range(given.runs):
        run = SmoothingCertifier(classify, classes, replace(settings, seed=seed), device)
        for at, row in zip(every, run.batch(indices, pixels, labels.tolist()), strict=True):
            if row.prediction is not None:
                certified += 1
                p = float(shares[at, row.prediction])
                wrong += row.radius > given.sigma * float(stats.norm.ppf(p))
    runs = given.runs * len(images)
    chance = stats.binom.sf(wrong - 1, runs, given.alpha)
    found = f"{certified} certificates, {wrong} wrong ({wrong / runs:.2%} and {wrong / max(1, certified):.2%})"
    print(f"{runs} runs ({len(images)} images, {given.runs} seeds), alpha {given.alpha:g}: {found}")
    print(f"if every run were wrong with probability alpha, so many or more would be with probability {chance:.2g}")


if __name__ == "__main__":
    main()
