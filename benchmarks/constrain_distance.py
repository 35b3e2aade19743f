"""The paper's one-sided distance against the plain one, on a network with ReLU.

    python benchmarks/constrain_distance.py CHECKPOINT --dataset torch/mnist --data-dir DIR [--images 300] [--layers PATTERN]

Table 1: each layer followed by ReLU, norm after / before (proven) at equal one-sided error; for the plain distance the
largest eta whose result has that one-sided error, by bisection. Table 2: all layers at one eta, the network's proven
bound and its accuracy on test images.
"""

import argparse
import math
import statistics as average
from fnmatch import fnmatch
from pathlib import Path

import torch

from certcli.constrain.layers import refusal
from certcli.constrain.network import Calibration, constrain_to, network_upper, rectified_paths, write
from certcli.constrain.options import Options
from certcli.constrain.parallel import constrain_layer
from certcli.constrain.relu import RectifiedStatistics
from certcli.images import datasets
from certcli.models import build
from certcli.models.open import open_checkpoint

ERRORS = (0.05, 0.1, 0.2)


def plain_ratio(layer: RectifiedStatistics, calibration: Calibration, allowed: float) -> tuple[float, float]:
    """(norm after / before, held-out one-sided error) of the plain distance at this one-sided error."""
    (plain,) = [each for each in calibration.layers() if each.path == layer.path]
    low, high, best = 0.0, 0.99, (1.0, 0.0)
    for _ in range(9):
        middle = (low + high) / 2
        found = constrain_layer(plain, Options(eta=middle))
        weight = found.weight.double().flatten(1)
        if float(layer.relative_errors(weight).max()) <= allowed:
            low, best = middle, (found.after / found.before, layer.held_out_error(weight) or 0.0)
        else:
            high = middle
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--test-images", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--layers", default="*", help="the layers of table 1")
    parser.add_argument("--etas", type=float, nargs="*", default=[0.05, 0.1, 0.2, 0.3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(options.checkpoint)
    record = checkpoint.record
    model = build.load(checkpoint, torch.device("cpu"), writable=True)
    images = (
        datasets.load(options.dataset, record.input, "train", options.data_dir).limit(options.images, 0).tensors()[0]
    )
    unseen = (
        datasets.load(options.dataset, record.input, "train", options.data_dir).limit(options.images, 1).tensors()[0]
    )
    test = datasets.load(options.dataset, record.input, "test", options.data_dir).limit(options.test_images, 0)
    paths = [f"net.{path}" for path, module in model.net.named_modules() if refusal(module) is None]
    rectified = rectified_paths(model, record.input.size, paths, "auto")
    batches, held_out = list(images.split(50)), list(unseen.split(50))

    ratios: dict[tuple[str, float], list[float]] = {}
    print("layer, one-sided error: norm after / before (held-out one-sided error): relu | plain")
    for path in sorted(rectified):
        if not fnmatch(path.removeprefix("net."), options.layers):
            continue
        alone = Calibration(model, [path], batches, held_out)
        (layer,) = Calibration(model, [path], batches, held_out, rectified=frozenset([path])).layers()
        assert isinstance(layer, RectifiedStatistics)
        for allowed in ERRORS:
            relu = constrain_layer(layer, Options(eta=allowed, iterations=options.iterations))
            ratio, seen = plain_ratio(layer, alone, allowed)
            ratios.setdefault(("relu", allowed), []).append(relu.after / relu.before)
            ratios.setdefault(("plain", allowed), []).append(ratio)
            print(
                f"  {path:20} {100 * allowed:3.0f} %: {relu.after / relu.before:.3f} "
                f"({100 * (relu.held_out_error or 0):.1f} %) | {ratio:.3f} ({100 * seen:.1f} %)",
                flush=True,
            )
    for (name, allowed), values in ratios.items():
        print(f"geometric mean, {name}, {100 * allowed:.0f} %: {math.exp(average.fmean(map(math.log, values))):.3f}")

    originals = {path: model.get_submodule(path).weight.detach().clone() for path in paths}

    def accuracy() -> float:
        with torch.no_grad():
            right = sum(int((model(pixels).argmax(1) == labels).sum()) for _, pixels, labels in test.batches(100))
        return right / len(test)

    size, classes = record.input.size, record.classes
    print(f"before: bound {network_upper(model, size, classes)}, accuracy {100 * accuracy():.1f} %")
    for distance, chosen in (("plain", frozenset[str]()), ("auto", rectified)):
        calibration = Calibration(model, paths, batches, None, rectified=chosen)
        for eta in options.etas:
            results = list(constrain_to(calibration, Options(eta=eta, iterations=options.iterations)))
            write(model, {result.path: result.weight for result in results})
            print(
                f"{distance}, eta {eta:g}: bound {network_upper(model, size, classes)}, accuracy {100 * accuracy():.1f} %",
                flush=True,
            )
            write(model, originals)


if __name__ == "__main__":
    main()
