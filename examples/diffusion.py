"""Trains one small diffusion model for `certvit certify --denoiser`, for every sigma at once and
without labels.

    python examples/diffusion.py CKPT DATASET -o FOLDER --seconds 1800

CKPT decides the size of the images alone. The folder is one of diffusers: `config.json`,
`scheduler_config.json` and `diffusion_pytorch_model.safetensors`, a running mean of the weights.
Where FOLDER holds a `training.safetensors`, the training goes on from it: its seconds count.
"""

import argparse
import copy
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from certcli.images.datasets import load_dataset
from certcli.models.diffusion import WEIGHTS, Schedule
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.nn.unet import UNet, UNetShape

WITHIN = 0.9
"""Share of the steps drawn up to --most: larger noise leaves nothing to certify, but the network answers there too."""
EVERY = 200
"""Steps between two lines and two writes."""
MEAN = 0.998
"""Of the running mean of weights: how much of it stays at each step."""
WARM = 100
RATE = 2e-3
STABLE_WIDTH = 64
"""Channels up to which the rate is RATE: at 256 channels and 224 pixels it diverged."""
UNTRAINED = 0.9
"""Of the loss: the noise's own mean square, which a network of zeros has, is 1."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ckpt")
    parser.add_argument("dataset", help="its training images are used")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64], help="of each level")
    parser.add_argument(
        "--seconds", type=float, default=1800, help="of CPU time; on a GPU by the clock"
    )
    parser.add_argument("--steps", type=int, help="in place of --seconds")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--rate", type=float, help="of Adam; 2e-3, less for levels wider than 64 channels"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="half-precision passes, some 1.5 times faster with AMX"
    )
    parser.add_argument("--mirror", action="store_true", help="half of the images left to right")
    parser.add_argument(
        "--crop",
        type=int,
        metavar="SIDE",
        help="train on random squares of this side, without attention: cheaper for large images",
    )
    parser.add_argument(
        "--most", type=float, default=1.0, help="sigma, in pixels, up to which it mostly trains"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    spec = open_checkpoint(options.ckpt, Hints()).record.input
    images = load_dataset(options.dataset, spec, "train", options.data_dir).tensors()[0]
    if options.rate is None:
        options.rate = min(RATE, RATE * STABLE_WIDTH / max(options.widths))
    levels = len(options.widths)
    shape = UNetShape(
        in_channels=spec.size[0],
        out_channels=spec.size[0],
        block_out_channels=tuple(options.widths),
        down_block_types=("DownBlock2D",) * levels,
        up_block_types=("UpBlock2D",) * levels,
        layers_per_block=1,
        norm_num_groups=8,
        add_attention=options.crop is None,
    )
    factor = shape.factor
    if any(side % factor for side in spec.size[1:]):
        parser.error(f"{levels} levels need sides that are multiples of {factor}: fewer --widths")
    shortest = min(spec.size[1:])
    if options.crop is not None and (options.crop % factor or not 0 < options.crop <= shortest):
        parser.error(f"--crop {options.crop}: a multiple of {factor}, at most {shortest}")
    train(images, shape, Schedule(), options)


def train(images: Tensor, shape: UNetShape, schedule: Schedule, options) -> None:  # type: ignore[no-untyped-def]
    """Minimise |epsilon - net(a x + s epsilon, t)|^2 by Adam; the rate falls to 0 at the end.
    t is uniform among the steps of noise up to `options.most`, in one of ten draws among all.
    """
    images = images.to(options.device)
    net = UNet(shape).to(options.device, memory_format=torch.channels_last)
    mean = copy.deepcopy(net)
    optimiser = torch.optim.Adam(net.parameters(), lr=options.rate)
    step, before = resume(net, mean, optimiser, options.output)
    left = schedule.alpha_bars.to(options.device)
    # noise and signal of a step, on [-1, 1]: twice the sigma of pixels
    usual = int(((1 - left) / left <= (2 * options.most) ** 2).sum())
    average = torch.zeros((), device=options.device)
    clock = time.process_time if options.device == "cpu" else time.monotonic
    started = clock()
    spent = before
    progress = 0.0
    while progress < 1:
        rate = min(1.0, (step + 1) / WARM) * (1 - progress)
        for group in optimiser.param_groups:
            group["lr"] = options.rate * rate
        clean = images[torch.randint(len(images), (options.batch,), device=images.device)]
        if options.crop:
            clean = cropped(clean, options.crop)
        if options.mirror:
            mirrored = torch.rand(len(clean), 1, 1, 1, device=clean.device) < 0.5
            clean = torch.where(mirrored, clean.flip(3), clean)
        loss = error(net, clean, left, usual, options.bf16)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        step += 1
        follow(mean, net, min(MEAN, step / (step + 10)))
        spent = before + clock() - started
        progress = step / options.steps if options.steps else spent / options.seconds
        average += (loss.detach() - average) / min(step, EVERY)
        if step % EVERY == 0 or progress >= 1:
            write(net, mean, optimiser, schedule, step, spent, options.output)
            print(f"step {step}: loss {average:.4f}, {spent:.0f} s", flush=True)
    if average > UNTRAINED:
        print(
            f"loss {average:.2f} where a network of zeros has 1: not trained; more steps, or a smaller --rate"
        )


def cropped(images: Tensor, side: int) -> Tensor:
    """Return one random square of this side of each image; images: (b, c, h, w)."""
    height, width = images.shape[2:]
    tops = torch.randint(height - side + 1, (len(images),)).tolist()
    lefts = torch.randint(width - side + 1, (len(images),)).tolist()
    squares = [
        image[:, top : top + side, left : left + side]
        for image, top, left in zip(images, tops, lefts, strict=True)
    ]
    return torch.stack(squares)


def error(net: UNet, clean: Tensor, left: Tensor, usual: int, bf16: bool) -> Tensor:
    """Return the mean squared error of the predicted noise; clean: (b, c, h, w) in [0, 1], `usual`
    the number of steps that most draws come from.
    """
    size = (len(clean),)
    device = clean.device
    among_all = torch.rand(size, device=device) >= WITHIN
    steps = torch.randint(usual, size, device=device)
    steps = torch.where(among_all, torch.randint(len(left), size, device=device), steps)
    alpha = left[steps].float()[:, None, None, None]
    noise = torch.randn_like(clean)
    noisy = alpha.sqrt() * (2 * clean - 1) + (1 - alpha).sqrt() * noise
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        predicted = net(noisy.contiguous(memory_format=torch.channels_last), steps)
    return (predicted.float() - noise).square().mean()


@torch.no_grad()
def follow(mean: UNet, net: UNet, share: float) -> None:
    for average, value in zip(mean.parameters(), net.parameters(), strict=True):
        average.lerp_(value, 1 - share)


def write(net, mean, optimiser, schedule, step, spent, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """Write the model in diffusers' form, and the state of the training; each file whole or not at
    all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"_class_name": "UNet2DModel", **asdict(net.shape)}
    rule = {"_class_name": "DDPMScheduler", **asdict(schedule)}
    for name, fields in (("config.json", config), ("scheduler_config.json", rule)):
        partial = folder / f"{name}.partial"
        partial.write_text(json.dumps(fields, indent=2) + "\n")
        os.replace(partial, folder / name)
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    state |= {f"mean.{name}": value for name, value in mean.state_dict().items()}
    for index, moments in optimiser.state_dict()["state"].items():
        state |= {f"adam.{index}.{name}": value for name, value in moments.items()}
    state["progress"] = torch.tensor([step, spent], dtype=torch.float64)
    for name, tensors in ((WEIGHTS, mean.state_dict()), ("training.safetensors", state)):
        partial = folder / f"{name}.partial"
        save_file({key: value.contiguous() for key, value in tensors.items()}, partial)
        os.replace(partial, folder / name)


def resume(net, mean, optimiser, folder: Path) -> tuple[int, float]:  # type: ignore[no-untyped-def]
    """Load the state of an interrupted training; return its steps and CPU seconds, 0 where there is
    none.
    """
    path = folder / "training.safetensors"
    if not path.exists():
        return 0, 0.0
    state = load_file(path)
    for part, module in (("net.", net), ("mean.", mean)):
        values = {
            name.removeprefix(part): value for name, value in state.items() if name.startswith(part)
        }
        module.load_state_dict(values)
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in state.items():
        if name.startswith("adam."):
            _, index, key = name.split(".")
            moments.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict(
        {"state": moments, "param_groups": optimiser.state_dict()["param_groups"]}
    )
    step, spent = state["progress"].tolist()
    return int(step), spent


if __name__ == "__main__":
    main()
