"""Run attacks of torchattacks as they are: radius, seed and number of classes are ours."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import OutOfMemoryError, Tensor, nn

from certcli.attack import catalogue, watched_model
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Region
from certcli.system.errors import CertvitError, UsageError, one_line

JSMA_ENTRIES = 4096
"""Entries of an image, at most: JSMA holds several tables of a row and a column for each."""


def craft(
    spec: catalogue.Spec,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    region: Region,
    settings: AttackSettings,
) -> Tensor:
    """Run the attack on images that share a radius: (b, c, h, w), (b,) -> same, to be judged.

    The library sees float32 images and the network behind a wall: it changes no mode, no gradient
    and no random numbers of the caller, and prints nothing. A default step size keeps its ratio to
    the default radius.

    Raises:
        UsageError: the attack fails on this network or these images.
    """
    adversarial = images.detach().clone()
    radii = region.radii(images)
    for radius in radii.unique().tolist():
        rows = (radii == radius).nonzero().flatten()
        if radius > 0:
            values = _call_arguments(spec, region, radius, settings, model, images)

            def run(
                net: watched_model.Watched,
                images: Tensor,
                labels: Tensor,
                values: dict[str, Any] = values,
            ) -> Tensor:
                with contextlib.redirect_stdout(io.StringIO()), _numpy_seeded(settings.draw):
                    attack = getattr(catalogue.torchattacks_library(), spec.name)(net, **values)
                    if spec.name == "JSMA":  # it would aim at class (y + 1) mod 10 of any network
                        classes = watched_model.count_classes(model, images, settings)
                        attack.set_mode_targeted_by_function(
                            lambda _, labels: (labels + 1) % classes, quiet=True
                        )
                    points: Tensor = attack(images.float(), labels)
                return points

            try:
                part = images[rows], labels.to(images.device)[rows], region.of(rows)
                adversarial[rows] = watched_model.craft_with(
                    run, model, *part, settings, watch=False
                ).to(adversarial.dtype)
            except (CertvitError, OutOfMemoryError):
                raise
            except Exception as failure:  # the library checks little of what it is given
                raise UsageError(
                    f"{spec} fails on these images: {type(failure).__name__}: {one_line(failure)[:120]}",
                    "another attack, or other arguments: certvit attack --list",
                ) from failure
    return adversarial


def _call_arguments(
    spec: catalogue.Spec,
    region: Region,
    radius: float,
    settings: AttackSettings,
    model: nn.Module,
    images: Tensor,
) -> dict[str, Any]:
    """Return the call's arguments: ours, defaults that follow the budget, and those given."""
    if spec.name == "JSMA" and images[0].numel() > JSMA_ENTRIES:
        raise UsageError(
            f"{spec} takes images of {JSMA_ENTRIES:,} values at most, not {images[0].numel():,}",
            "another attack: certvit attack --list shows them",
        )
    spec_signature = catalogue.signature(spec.name)
    ours = {
        "eps": radius,
        "max_epsilon": radius,
        "norm": {"l2": "L2", "linf": "Linf"}[region.norm],
        "seed": settings.draw,
        "n_classes": watched_model.count_classes(model, images, settings),
        "n_queries": settings.queries,
        **(dict.fromkeys(catalogue.BUDGET, settings.steps) if settings.steps is not None else {}),
    }
    if "alpha" in spec_signature.arguments and spec_signature.radius is not None:
        ours["alpha"] = spec_signature.arguments["alpha"] * radius / spec_signature.radius
    return {
        **{name: value for name, value in ours.items() if name in spec_signature.takes},
        **dict(spec.values),
    }


@contextlib.contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """Draw numpy's global random numbers from `seed`, and put the caller's back."""
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)
