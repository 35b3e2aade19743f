"""What diffusers' own networks and schedules give for the cases of
`tests/helpers/diffusion.py`.

    python -m tests.models.diffusers_outputs          compares them with the stored outputs
    python -m tests.models.diffusers_outputs --write  stores them

It needs diffusers, and nothing of certvit (`make test-converters`).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers.diffusion import NETWORKS, SCHEDULES, STEPS, fill, noisy_images

STORED = Path(__file__).with_name("diffusers_outputs.json")


def outputs() -> dict[str, Any]:
    from diffusers import DDPMScheduler, UNet2DModel

    networks = {}
    for name, fields in NETWORKS.items():
        net = UNet2DModel(**fields).eval()
        with torch.no_grad():
            fill(net)
            networks[name] = net(noisy_images(), torch.tensor(STEPS)).sample.flatten().tolist()
    schedules = {}
    for name, fields in SCHEDULES.items():
        left = DDPMScheduler(**fields).alphas_cumprod
        schedules[name] = left[:: max(1, len(left) // 8)].tolist()
    return {"networks": networks, "schedules": schedules}


def main_of_diffusers() -> None:
    made = outputs()
    if "--write" in sys.argv:
        STORED.write_text(json.dumps(made) + "\n")
        return
    stored = json.loads(STORED.read_text())
    for kind, cases in made.items():
        for name, values in cases.items():
            theirs = torch.tensor(values)
            difference = float((theirs - torch.tensor(stored[kind][name])).abs().max())
            assert difference <= 1e-5 * float(theirs.abs().max()), (kind, name, difference)
    print("diffusers gives the stored outputs")


if __name__ == "__main__":
    main_of_diffusers()
