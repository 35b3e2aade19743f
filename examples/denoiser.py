"""Trains a DnCNN for `certvit certify --denoiser`, for a classifier that stays as it is.

    python examples/denoiser.py CKPT DATASET --sigma 0.25 -o dncnn.safetensors

No labels are read. First the mean squared error on random crops under Gaussian noise (Zhang et al.
2017), then the cross entropy between the classifier's answers to clean images and to cleaned ones
("stability", Salman et al. 2020).
"""

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from certcli.certify.smoothing.denoiser import Denoiser
from certcli.images.datasets import load_dataset
from certcli.models.build import load as build
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints

CROP = 64
CROPS = 16
WHOLE = 8
"""Pixels a side of a crop, crops a step, and whole images a step of the second stage."""
EVERY = 200
"""Steps between two lines and two writes."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ckpt")
    parser.add_argument("dataset", help="its training images are used")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument(
        "--sigma", type=float, required=True, help="of the noise, on pixels in [0, 1]"
    )
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10_000, help="of the first stage")
    parser.add_argument("--stable-steps", type=int, default=300, help="of the second stage")
    parser.add_argument(
        "--start", type=Path, help="a denoiser to go on from, in place of the first stage"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    checkpoint = open_checkpoint(options.ckpt, Hints())
    spec = checkpoint.record.input
    pixels = (
        (load_dataset(options.dataset, spec, "train", options.data_dir).tensors()[0] * 255)
        .round()
        .to(torch.uint8)
    )
    net = Denoiser(spec.size[0], options.width, options.depth).to(memory_format=torch.channels_last)
    if options.start is None:
        train(
            net,
            options.steps,
            1e-3,
            options.output,
            lambda: error(net, crops(pixels), options.sigma),
        )
    else:
        net.load_state_dict(load_file(options.start))
    classifier = build(checkpoint).eval().requires_grad_(False)
    net.eval()  # the first stage's means and variances stay
    stable = lambda: instability(net, classifier, whole(pixels), options.sigma)  # noqa: E731
    train(net, options.stable_steps, 1e-4, options.output, stable)


def train(net: Denoiser, steps: int, rate: float, output: Path, loss_of) -> None:  # type: ignore[no-untyped-def]
    """Minimise by Adam, the rate falling along a cosine, and write the file now and then."""
    optimiser = torch.optim.Adam(net.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    mean = 0.0
    started = time.process_time()
    for step in range(1, steps + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        mean += (loss.item() - mean) / min(step, EVERY)
        if step % EVERY == 0 or step == steps:
            save_file(
                {name: tensor.contiguous() for name, tensor in net.state_dict().items()}, output
            )
            print(
                f"step {step}: loss {mean:.5f}, {time.process_time() - started:.0f} CPU s",
                flush=True,
            )


def error(net: Denoiser, clean: Tensor, sigma: float) -> Tensor:
    return (net(clean + sigma * torch.randn_like(clean)).float() - clean).square().mean()


def instability(net: Denoiser, classifier: nn.Module, clean: Tensor, sigma: float) -> Tensor:
    with torch.no_grad():
        answers = classifier(clean).float().argmax(1)
    return nn.functional.cross_entropy(
        classifier(net(clean + sigma * torch.randn_like(clean)).float()).float(), answers
    )


def crops(images: Tensor) -> Tensor:
    height, width = images.shape[2:]
    side = min(CROP, height, width)
    which = torch.randint(0, len(images), (CROPS,)).tolist()
    rows_of, lefts = (
        torch.randint(0, size - side + 1, (CROPS,)).tolist() for size in (height, width)
    )
    crops_of = [
        images[i, :, y : y + side, x : x + side]
        for i, y, x in zip(which, rows_of, lefts, strict=True)
    ]
    return (torch.stack(crops_of).float() / 255).contiguous(memory_format=torch.channels_last)


def whole(images: Tensor) -> Tensor:
    return images[torch.randint(0, len(images), (WHOLE,))].float() / 255


if __name__ == "__main__":
    main()
