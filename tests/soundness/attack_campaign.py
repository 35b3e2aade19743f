"""A long campaign against certificates of every method: attacks inside the certified radii of
random networks.

    python -m tests.soundness.attack_campaign --attacks 100000 --seed 0 [--method NAME]

An attack is one start, descended on the margins and judged at each step by the network as the
certificate's arithmetic executes it, at the end in other orders of sums too; against patches, one
content of one place, judged by the defended classifier. Each method makes at least N attacks.
Prints counts by row and the largest share of a margin that an attack took;
exits 1 at the first image of another class inside a radius. Smoothing may be wrong:
coverage_campaign.py counts how often.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401

# isort: split
from timm.models.vision_transformer import VisionTransformer

from certcli.certify.box.certifier import BoxCertifier
from certcli.certify.certificate import Certifier
from certcli.certify.chains.local_lip import BcpCertifier, LocalLipCertifier
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.certify.local import LocalCertifier
from certcli.certify.options import (
    BRANCH,
    REAL,
    Arithmetic,
    Effort,
    Local,
    Patches,
    Proof,
)
from certcli.certify.patch.certifier import PatchCertifier, TouchedPasses, defended
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.image_records import Certificate, PatchCertificate
from certcli.evaluation.perturbation import Region
from certcli.evaluation.threat import Patch
from certcli.lipschitz.network import prove_network
from certcli.models.pixels import PixelModel
from certcli.system.errors import NoBoundError
from tests.certify.test_local_lip import NETWORKS as CHAINS
from tests.certify.test_patch_theorems import Bright
from tests.enclosure.test_zonotope_networks import OPTIONS as VITS
from tests.enclosure.test_zonotope_networks import network as vision_transformer
from tests.helpers.executions import logits_of_executions, representable
from tests.rounding.test_neighbours import CASES
from tests.soundness.edits import asked_for

STEPS = 20
JUDGED = 5
"""Steps of descent, and every how many of them the executed network is asked."""
IMAGES = 6
PLACES = 20
"""Of a patch, at most: all of them on the images of twenty pixels."""
NORMS = ("l2", "linf")
BRANCHING = 3.0
"""Seconds that branch and bound may take for an image."""


@dataclass(frozen=True)
class Row:
    """A method with its options, made ready for a random network. starts: attacks on each
    certificate.
    """

    method: str
    name: str
    make: Callable[[PixelModel], Certifier]
    network: Callable[[int], PixelModel]
    starts: int = 250


def random_chain(seed: int) -> PixelModel:
    """The chains of tests/certify/test_local_lip.py, with other weights."""
    return built_network(list(CHAINS.values())[seed % len(CHAINS)], seed)


def anything(seed: int) -> PixelModel:
    """The networks of tests/rounding/test_neighbours.py, with other weights."""
    return built_network(list(CASES.values())[seed % len(CASES)], seed)


def built_network(make: Callable[[], nn.Module], seed: int) -> PixelModel:
    torch.manual_seed(seed)
    with torch.no_grad():
        net = make()
    return (
        PixelModel(InputSpec(size=(1, 6, 6), mean=(0.4,), std=(0.3,)), net)
        .double()
        .eval()
        .requires_grad_(False)
    )


def small_network(seed: int) -> PixelModel:
    """A chain, or a vision transformer of sixteen pixels."""
    kinds = list(VITS)
    return (
        random_chain(seed // 4)
        if seed % 4 == 0
        else vision_transformer(kinds[seed % len(kinds)], seed)
    )


def masked(seed: int) -> PixelModel:
    """Networks whose class a patch does not always change: they add up parts of the image, or are
    made of tokens.
    """
    torch.manual_seed(seed)
    if seed % 8 == 7:  # a hundred times as slow
        net: nn.Module = VisionTransformer(
            12, 3, 1, 3, embed_dim=8, depth=1, num_heads=2, global_pool="avg"
        )
        for parameter in net.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        size = (1, 12, 12)
    else:
        net = Bright(seed)
        size = (1, 4, 5)
    return (
        PixelModel(InputSpec(size=size, mean=(0.5,), std=(0.5,)), net).eval().requires_grad_(False)
    )


def classes_of(model: PixelModel) -> int:
    return model(torch.zeros(1, *model.input_size).double()).shape[1]


def proving(method: str, arithmetic: str) -> Callable[[PixelModel], Certifier]:
    chains = {"local-lip": LocalLipCertifier, "bcp": BcpCertifier}

    def make(model: PixelModel) -> Certifier:
        classes = classes_of(model)
        name = Proof(arithmetic).arithmetic
        if method in chains:
            return chains[method](model, classes, model.input_size, name)
        kind = BoxCertifier if method == "box" else LipschitzCertifier
        return kind(model, prove_network(model, classes), name)

    return make


def local_row(effort: str, norm: Any, arithmetic: str) -> Callable[[PixelModel], Certifier]:
    def make(model: PixelModel) -> Certifier:
        seconds = BRANCHING if effort == BRANCH else None
        options = Local(effort, norm, arithmetic=arithmetic, seconds=seconds)
        return LocalCertifier(model, model.input_size, options, symbols=300, steps=2)

    return make


def against_patches(procedure: str, size: str) -> Callable[[PixelModel], Certifier]:
    options = Patches([size], {"voting": "voting:1"}.get(procedure, f"{procedure}:4"), rows=64)
    return lambda model: defended(model, options)


ROWS = (
    *(
        Row(method, name, proving(method, name), anything)
        for method in ("lipschitz", "box")
        for name in get_args(Arithmetic)
    ),
    *(
        Row(method, name, proving(method, name), random_chain)
        for method in ("local-lip", "bcp")
        for name in get_args(Arithmetic)
    ),
    *(
        Row("local", f"{effort} {norm} {name}", local_row(effort, norm, name), small_network, 200)
        for effort, norm in itertools.product(get_args(Effort), NORMS)
        for name in get_args(Arithmetic)
    ),
    *(
        Row("patch", f"{procedure} {size}", against_patches(procedure, size), masked, 20)
        for procedure, size in itertools.product(("double-masking", "voting"), ("1", "2x1", "2"))
    ),
)
COUNTED_ELSEWHERE = ("smoothing",)
"""Methods whose certificates may be wrong, with a probability: coverage_campaign.py."""


@dataclass
class Seen:
    """attacks by (method, row); the largest share of a margin that an attack took, by method; what
    broke.
    """

    attacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    claims: Counter[str] = field(default_factory=Counter)
    taken: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def of(self, method: str) -> int:
        return sum(count for (its, _), count in self.attacks.items() if its == method)


def pixels_of(size: tuple[int, int, int], seed: int, count: int = IMAGES) -> Tensor:
    """Images of noise, half of them with half of their pixels at 0 or 1, all of which every
    arithmetic has.
    """
    noise = torch.rand(count, *size, generator=torch.Generator().manual_seed(seed)).double()
    noise[1::2] = (2 * noise[1::2] - 0.5).clamp(0, 1)
    return (noise * 128).round() / 128


def claims_of(certifier: Certifier, model: nn.Module, pixels: Tensor) -> list[Certificate]:
    """What the method claims, as certified with the class that the network gives."""
    labels = model(pixels).argmax(1).tolist()
    step = certifier.at_once or len(pixels)
    parts = [range(start, min(start + step, len(pixels))) for start in range(0, len(pixels), step)]
    rows = [
        row
        for part in parts
        for row in certifier.batch(part, pixels[part], [labels[i] for i in part])
    ]
    return [row for row in rows if row.held and row.prediction is not None]


class Balls:
    """Many starts within the radius of each claim, all at once. boxed: in the linf ball."""

    def __init__(
        self,
        certifier: Certifier,
        model: nn.Module,
        pixels: Tensor,
        claims: list[Certificate],
        starts: int,
    ):
        self.model = model
        self.arithmetic = certifier.arithmetic
        self.boxed = certifier.norm == "linf"
        owners = torch.arange(len(claims)).repeat_interleave(starts)
        self.images = pixels[[row.index for row in claims]][owners]
        self.labels = torch.tensor([row.prediction for row in claims])[owners, None]
        # beyond 30 no image of the box is farther away; 2^-50: the length of a move is rounded
        radii = torch.tensor([min(row.radius, 30.0) for row in claims], dtype=torch.float64)[owners]
        self.radii = radii.view(-1, 1, 1, 1) * (1 - 2.0**-50)
        place = torch.arange(len(owners)).view(-1, 1, 1, 1)
        self.rim = place % 2 == 0
        self.clipped = (place % 4 < 2) | (certifier.domain == "box")
        self.owners = owners
        self.starts = starts

    def length(self, moves: Tensor) -> Tensor:
        flat = moves.flatten(1)
        return (
            (flat.abs().amax(1) if self.boxed else flat.norm(dim=1))
            .clamp_min(1e-300)
            .view(-1, 1, 1, 1)
        )

    def placed(self, moves: Tensor) -> Tensor:
        """The images at these moves, brought into the ball or onto its rim, and into the box where
        claims are about it.
        """
        if self.boxed:
            moves = moves.clamp(-self.radii, self.radii)
        else:
            far = self.radii / self.length(moves)
            moves = moves * torch.where(self.rim, far, far.clamp_max(1))
        near = self.images + moves
        return torch.where(self.clipped, near.clamp(0, 1), near)

    def margins(self, logits: Tensor) -> Tensor:
        ahead = logits.gather(1, self.labels) - logits
        return ahead.scatter(1, self.labels, torch.inf)

    def run(self, seed: int) -> tuple[Tensor, Tensor]:
        """Descend: the least margin of each claim, and whether its class fell; (n,), (n,) bool."""
        moves = torch.randn(
            self.images.shape, generator=torch.Generator().manual_seed(seed)
        ).double()
        moves = moves.sign() * self.radii if self.boxed else moves / self.length(moves) * self.radii
        inner = (
            torch.rand(
                len(moves), 1, 1, 1, generator=torch.Generator().manual_seed(seed + 1)
            ).double()
            ** 0.1
        )
        moves = torch.where(self.rim, moves, inner * moves)
        smallest = torch.full((len(moves),), torch.inf).double()
        fell = torch.zeros(len(moves), dtype=torch.bool)
        aims = torch.arange(len(moves))
        for step in range(STEPS + 1):
            near = self.placed(moves).detach().requires_grad_(True)
            margins = self.margins(self.model(near))
            lowest = margins.amin(1)
            smallest = torch.minimum(smallest, lowest.detach())
            if step % JUDGED == 0:
                fell |= self.falls(near.detach(), step == STEPS)
            aimed = margins.gather(1, (aims % margins.shape[1])[:, None])[:, 0]
            chosen = torch.where(torch.isfinite(aimed) & (step < STEPS // 2), aimed, lowest)
            (slope,) = torch.autograd.grad(chosen[torch.isfinite(chosen)].sum(), near)
            steep = slope.sign() if self.boxed else slope / self.length(slope)
            moves = (
                near.detach() - self.images - 0.5 * (1 - step / (STEPS + 1)) * self.radii * steep
            )
        shape = (-1, self.starts)
        return smallest.view(shape).amin(1), fell.view(shape).any(1)

    @torch.no_grad()
    def falls(self, near: Tensor, thoroughly: bool) -> Tensor:
        """Whether an execution in the claims' arithmetic gives another class, or a tie, at images
        that it has: (b,) bool.
        """
        if self.arithmetic == REAL:
            return self.margins(self.model(near)).amin(1) <= 0
        prediction = self.images
        tried = torch.zeros(len(near), dtype=torch.bool)
        for share in (
            0.8,
            0.95,
            0.99,
            0.999,
            1 - 2.0**-20,
            1.0,
        ):  # the farthest that is still inside when it is rounded
            moved = representable(self.images + share * (near - self.images), self.arithmetic)
            away = (moved - self.images).flatten(1)
            inside = (
                away.abs().amax(1) if self.boxed else away.norm(dim=1)
            ) <= self.radii.flatten()
            prediction = torch.where(inside.view(-1, 1, 1, 1), moved, prediction)
            tried = tried | inside
        every = logits_of_executions(self.model, prediction, self.arithmetic)
        fell = torch.zeros_like(tried)
        for logits in every if thoroughly else itertools.islice(every, 1):
            fell |= ~(self.margins(logits).amin(1) > 0)  # NaN is no class
        return fell & tried


def attack_balls(
    row: Row, certifier: Certifier, model: PixelModel, pixels: Tensor, seed: int, seen: Seen
) -> None:
    claims = claims_of(certifier, model, pixels)
    if not claims:
        return
    least, fell = Balls(certifier, model, pixels, claims, row.starts).run(seed)
    note(row, len(claims), len(claims) * row.starts, seen)
    images = pixels[[claim.index for claim in claims]]
    two = model(images).topk(2, dim=1).values
    shares = 1 - least / (two[:, 0] - two[:, 1])
    seen.taken[row.method] = max(seen.taken.get(row.method, 0.0), float(shares.max()))
    for claim, margin, lost in zip(claims, least.tolist(), fell.tolist(), strict=True):
        if lost or not (margin > 0 or certifier.arithmetic not in (REAL, "float64")):
            seen.broken.append(
                f"{row.method} {row.name}, seed {seed}: margin {margin:.3g} within {claim.radius:.6g}"
            )


def attack_patches(
    row: Row, certifier: Certifier, model: PixelModel, pixels: Tensor, seed: int, seen: Seen
) -> None:
    """Black, white, noise and what gradients of the passes that see the patch make of noise, at
    many places.
    """
    assert isinstance(certifier, PatchCertifier)
    pixels = pixels.float()
    draw = torch.Generator().manual_seed(seed)
    claims = claims_of(certifier, model, pixels)
    for claim in claims:
        assert isinstance(claim, PatchCertificate)
        (patch,) = map(Patch.from_key, claim.proven)
        image = pixels[claim.index].expand(row.starts, -1, -1, -1)
        near = []
        sides = zip(image.shape[2:], (patch.height, patch.width), strict=True)
        corners = list(itertools.product(*(range(side - length + 1) for side, length in sides)))
        for place in torch.randperm(len(corners), generator=draw)[:PLACES].tolist():
            region = Region.within(patch, [corners[place]] * row.starts, image)
            climbed = TouchedPasses(certifier, patch, corners[place])
            filled = torch.rand(image.shape, generator=draw)
            filled[:2] = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
            filled[2::2] = filled[2::2].round()
            for _ in range(3):
                here = region.project(filled, image).requires_grad_(True)
                (slope,) = torch.autograd.grad(climbed(here)[:, claim.prediction].sum(), here)
                near.append(here.detach())
                filled = (here.detach() - 0.7 * slope.sign()).clamp(0, 1)
            near.append(region.project(filled, image))
        found = certifier.predict(torch.cat(near))
        note(row, 1, len(found) // 4, seen)
        if set(found) != {claim.prediction}:
            seen.broken.append(f"patch {row.name}, seed {seed}: image {claim.index}, {patch}")


def note(row: Row, claims: int, attacks: int, seen: Seen) -> None:
    seen.attacks[row.method, row.name] += attacks
    seen.claims[row.method] += claims


def attack_row(row: Row, seed: int, seen: Seen) -> None:
    """One network of a row, its images and their certificates."""
    model = row.network(seed)
    try:
        certifier = row.make(model)
        one_by_one = certifier.at_once == 1  # seconds an image
        pixels = pixels_of(model.input_size, seed, 2 if one_by_one else IMAGES)
        run = attack_patches if certifier.norm == "patch" else attack_balls
        run(row, certifier, model, pixels, seed, seen)
    except NoBoundError:  # a refusal claims nothing
        return


def rounds(method: str) -> Iterator[tuple[Row, int]]:
    """Every row of a method in turn, with ever new seeds."""
    rows = [row for row in ROWS if row.method == method]
    for seed in itertools.count():
        for row in rows:
            yield row, seed


def attack_campaign() -> int:
    methods = list(dict.fromkeys(row.method for row in ROWS))
    asked = asked_for(__doc__ or "", attacks=100_000, method=tuple(methods))
    seen = Seen()
    for method in [asked.method] if asked.method else methods:
        first = next(row.name for row in ROWS if row.method == method)
        for row, seed in rounds(method):
            if seen.of(method) >= asked.attacks or seen.broken:
                break
            attack_row(row, asked.seed + seed, seen)
            if row.name == first:
                print(f"seed {asked.seed + seed}: {method} {seen.of(method):,}", flush=True)
        for (its, name), count in sorted(seen.attacks.items()):
            if its == method:
                print(f"{method} {name}: {count:,}")
        taken = (
            f", {seen.taken[method]:.6f} of a margin taken at most" if method in seen.taken else ""
        )
        print(
            f"{method}: {seen.of(method):,} attacks on {seen.claims[method]:,} certificates{taken}",
            flush=True,
        )
    for line in seen.broken:
        print(f"VIOLATED: {line}")
    return 1 if seen.broken else 0


if __name__ == "__main__":
    sys.exit(attack_campaign())
