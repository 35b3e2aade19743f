"""Certificates against patches: covers, the two theorems, passes that give the same bits, and the command."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from certcli.attack.patch import Target, attack_patches
from certcli.attack.settings import AttackSettings
from certcli.certify.methods import prepare
from certcli.certify.patch import masks
from certcli.certify.patch.ablation import Voting, stays, winner
from certcli.certify.patch.certifier import PatchCertifier
from certcli.certify.patch.climbed import TouchedPasses
from certcli.certify.patch.defended import GreyPixels, KeptTokens, SeenPart, seen_part
from certcli.certify.patch.double_masking import DoubleMasking
from certcli.certify.patch.masks import Grid
from certcli.certify.patch.options import Patches
from certcli.certify.patch.passes import Answer, Passes
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.sizes import Patch
from certcli.models import build
from certcli.system.errors import UsageError

CPU = torch.device("cpu")


def places(grid: Grid, patch: Patch) -> list[Tensor]:
    """The pixels (height, width) bool of one such patch, at every place."""
    found = []
    for top, left in itertools.product(range(grid.height - patch.height + 1), range(grid.width - patch.width + 1)):
        pixels = torch.zeros(grid.height, grid.width, dtype=torch.bool)
        pixels[top : top + patch.height, left : left + patch.width] = True
        found.append(pixels)
    return found


def shown(views: Tensor, grid: Grid) -> Tensor:
    """Views as pixels: (m, rows, columns) -> (m, height, width)."""
    down, across = grid.cell
    return views.repeat_interleave(down, 1).repeat_interleave(across, 2)[:, : grid.height, : grid.width]


# sizes


@pytest.mark.parametrize(
    ("text", "patch", "spelled"),
    [
        ("32", Patch(32, 32), "32x32"),
        ("16x64", Patch(64, 16), "16x64"),
        ("2%", Patch(32, 32), "32x32"),
        ("1%", Patch(23, 23), "23x23"),
        ("2:32", Patch(32, 32, 2), "2:32x32"),
        ("3:2x5", Patch(5, 2, 3), "3:2x5"),
        ("100%", Patch(224, 224), "224x224"),
    ],
)
def test_patches_are_read_and_spelled(text: str, patch: Patch, spelled: str) -> None:
    assert Patch.read(text, (224, 224)) == patch
    assert str(patch) == spelled
    assert Patch.read(spelled, (224, 224)) == patch


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "3x", "x3", "300", "3x300", "0%", "101%", "0:3", "3.5", "1e2", "2:2:3"]
)
def test_what_is_no_patch_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Patch.read(text, (224, 224))


# covers


def test_intervals_cover_every_place_of_every_patch() -> None:
    """Exhaustive for sides up to 13: the cells that a patch meets lie within one interval."""
    for length, cell, count in itertools.product(range(2, 14), (1, 2, 3, 5), range(1, 6)):
        for patch in range(1, length + 1):
            intervals = masks.cover(length, patch, cell, count)
            assert len(intervals) <= count
            assert len({stop - start for start, stop in intervals}) == 1
            for start in range(length - patch + 1):
                first, last = start // cell, (start + patch - 1) // cell
                assert any(a <= first and last < b <= -(-length // cell) for a, b in intervals), (length, cell, patch)


@pytest.mark.parametrize("grid", [Grid(7, 9, (1, 1)), Grid(8, 11, (2, 3)), Grid(9, 7, (4, 2))], ids=str)
@pytest.mark.parametrize("patch", [Patch(2, 2), Patch(1, 3), Patch(3, 1), Patch(1, 1)], ids=str)
def test_masks_hide_every_place_and_a_hole_is_found(grid: Grid, patch: Patch) -> None:
    """Pixel by pixel; then one mask after the other is made smaller by a row or a column, or left out."""
    views = masks.square_masks(grid, patch, 3)
    every = torch.stack(places(grid, patch))

    def covered(some: Tensor) -> bool:
        return bool((~(shown(some, grid)[:, None] & every[None]).flatten(2).any(dim=2)).any(dim=0).all())

    assert covered(views)
    assert masks.hole(views, grid, patch) is None
    holes = 0
    for index in range(len(views)):
        rows, columns = (~views[index]).nonzero().unbind(1)
        smaller, narrower = views.clone(), views.clone()
        smaller[index, rows.min()], narrower[index, :, columns.max()] = True, True
        left_out = views[[other for other in range(len(views)) if other != index]]
        for mutant in (smaller, narrower, left_out):
            assert (masks.hole(mutant, grid, patch) is None) == covered(mutant)
            holes += not covered(mutant)
            if not covered(mutant):
                with pytest.raises(UsageError, match="no mask hides"):
                    DoubleMasking(grid, [patch], 3).use(mutant, grid, [patch])
    assert holes > 0


@pytest.mark.parametrize("patch", [Patch(2, 2), Patch(3, 1), Patch(1, 2, 2)], ids=str)
@pytest.mark.parametrize("grid", [Grid(5, 6, (1, 1)), Grid(6, 7, (2, 3))], ids=str)
@pytest.mark.parametrize("kind", ["columns", "rows", "blocks"])
def test_the_bands_that_a_patch_meets(kind: str, grid: Grid, patch: Patch) -> None:
    """Against pixels: each place's bands are within one of the sets, and each set is that of some places."""
    views = masks.band_views(grid, kind, 1)
    single = places(grid, Patch(patch.height, patch.width))
    every = single if patch.count == 1 else [a | b for a, b in itertools.product(single, single)]
    met = torch.stack([(shown(views, grid) & pixels).flatten(1).any(dim=1) for pixels in every])
    sets = masks.met_views(views, grid, patch)
    assert all(bool((found <= sets).all(dim=1).any()) for found in met)
    assert all(bool((found == met).all(dim=1).any()) for found in sets)


# the theorems: passes that see something of the patch answer as they like


class Told(Passes):
    """Answers that are told beforehand: (image, view) -> class."""

    def __init__(self, views: Tensor, tell: Callable[[int, int], int], rows: int = 3) -> None:
        self.views, self.rows, self.kinds, self.tell = views, rows, [0] * len(views), tell
        self.asked: list[tuple[int, int]] = []

    def answers(self, pixels: Tensor, wanted: Sequence[tuple[int, int]]) -> list[Answer]:
        self.asked += wanted
        return [Answer(self.tell(image, view), 1.0, True) for image, view in wanted]


GRID = Grid(4, 5, (1, 1))
ONE_IMAGE = torch.zeros(1, 1, 4, 5)


CONTESTS = {
    "one": (GRID, [Patch(2, 2)], 2, 60),
    "two sizes": (GRID, [Patch(1, 1), Patch(2, 3)], 2, 40),
    "two patches at once": (Grid(3, 3, (1, 1)), [Patch(1, 1, 2)], 3, 6),
}


@pytest.mark.parametrize("name", CONTESTS)
def test_no_answers_of_touched_passes_change_what_double_masking_proves(name: str) -> None:
    grid, patches, count, trials = CONTESTS[name]
    generator = torch.Generator().manual_seed(0)
    defence, image = DoubleMasking(grid, patches, count), torch.zeros(1, 1, grid.height, grid.width)

    def found_by(answers: Sequence[int]) -> Told:
        return Told(defence.views, lambda _, view: answers[view])

    proven = broken = 0
    for trial in range(trials):
        wrong = (torch.rand(len(defence.views), generator=generator) < (0, 0.03, 0.1)[trial % 3]).tolist()
        clean = [1 + trial % 2 if off else 0 for off in wrong]
        (found,) = defence.certify(found_by(clean), image, [0])
        assert found.prediction == defence.predict(found_by(clean), image)[0].prediction
        for patch in patches:
            single = places(grid, Patch(patch.height, patch.width))
            every = single if patch.count == 1 else [a | b for a, b in itertools.combinations(single, 2)]
            for pixels in every:
                touched = (shown(defence.views, grid) & pixels).flatten(1).any(dim=1)
                drawn = torch.randint(0, 3, (3, len(touched)), generator=generator)
                drawn[0] = 1  # all for one other class
                for answers in drawn:
                    attacked = torch.where(touched, answers, torch.tensor(clean)).tolist()
                    (now,) = defence.predict(found_by(attacked), image)
                    if patch in found.proven:
                        proven += 1
                        assert now.prediction == found.prediction == 0
                    else:
                        broken += now.prediction != found.prediction
    assert proven > 100
    assert broken > 10  # the attack is one


def test_every_pair_is_needed() -> None:
    """One pair that differs, and a patch where only one of its masks hides it whole: its second round fails."""
    defence = DoubleMasking(GRID, [Patch(2, 2)], 2)
    for pair in itertools.combinations(range(4), 2):
        odd = defence.view(*pair)
        (found,) = defence.certify(Told(defence.views, lambda image, view, odd=odd: int(view == odd)), ONE_IMAGE, [0])
        assert found.proven == ()
        beaten = 0
        for pixels in places(GRID, Patch(2, 2)):
            touched = (shown(defence.views, GRID) & pixels).flatten(1).any(dim=1).tolist()
            told = Told(defence.views, lambda i, view, t=touched, odd=odd: 2 if t[view] else int(view == odd))
            beaten += defence.predict(told, ONE_IMAGE)[0].prediction != 0
        assert beaten > 0


def test_a_refuted_image_stops_at_its_first_pair() -> None:
    defence = DoubleMasking(GRID, [Patch(2, 2)], 2)
    told = Told(defence.views, lambda image, view: int(image == 1 and view >= defence.count), rows=1)
    refuted = defence.certify(told, ONE_IMAGE.repeat(2, 1, 1, 1), [0, 0])
    assert [one.proven for one in refuted] == [(Patch(2, 2),), ()]
    pairs = [image for image, view in told.asked if view >= defence.count]
    assert pairs.count(0) == 6
    assert pairs.count(1) == 1


def test_voting_is_exact() -> None:
    """A vote count stays exactly where no votes of any one set of bands, all tried, change the winner."""
    generator = torch.Generator().manual_seed(1)
    grid, classes = Grid(2, 7, (1, 1)), 3
    views = masks.band_views(grid, "columns", 2)
    outcomes = set()
    for patch in (Patch(1, 1), Patch(2, 2)):
        sets = masks.met_views(views, grid, patch)
        for trial in range(40):
            votes = torch.randint(0, 1 + trial % classes, (7,), generator=generator).tolist()
            firm = [bool(trial % 10 != place) for place in range(7)]
            top = winner(votes, classes)
            free = [[place for place in range(7) if lost[place] or not firm[place]] for lost in sets.tolist()]
            brute = True
            for some in free:
                for replaced in itertools.product(range(classes), repeat=len(some)):
                    now = list(votes)
                    for place, vote in zip(some, replaced, strict=True):
                        now[place] = vote
                    brute = brute and winner(now, classes) == top
            assert stays(top, votes, firm, sets, classes) == brute
            outcomes.add(brute)
    assert outcomes == {True, False}


# passes of real networks


def pixel_model(net: nn.Module, size: tuple[int, int, int]) -> build.PixelModel:
    spec = InputSpec(size=size, mean=(0.5,) * size[0], std=(0.5,) * size[0], interpolation="bicubic", crop_pct=1.0)
    return build.PixelModel(spec, net.eval()).eval()


def vit(arch: str = "vit_tiny_patch16_224", **given: Any) -> build.PixelModel:
    torch.manual_seed(0)
    shape = {
        "img_size": 16,
        "patch_size": 4,
        "in_chans": 3,
        "num_classes": 5,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
    }
    net = timm.create_model(arch, **{**shape, **given})
    for weight in net.parameters():  # timm starts heads and tokens near zero
        nn.init.normal_(weight, std=0.2)
    return pixel_model(net, (3, 16, 16))


TOKENS = {
    "class token": vit,
    "average": lambda: vit(global_pool="avg", class_token=False, fc_norm=False),
    "registers": lambda: vit(reg_tokens=3),
    "registers without positions": lambda: vit(reg_tokens=2, no_embed_class=True),
    "no positions": lambda: vit(pos_embed="none"),
    "distilled": lambda: vit("deit_tiny_distilled_patch16_224"),
    "rectangles": lambda: vit(patch_size=(2, 8)),
}


@pytest.mark.parametrize("name", TOKENS)
def test_dropped_tokens_are_out_of_the_pass(name: str) -> None:
    part = seen_part(TOKENS[name](), "tokens")
    assert isinstance(part, KeptTokens)
    pixels = torch.rand(4, 3, 16, 16)
    views = torch.ones(4, *part.grid.shape, dtype=torch.bool)
    torch.testing.assert_close(part(pixels, views), part.model(pixels), rtol=1e-4, atol=1e-4)  # sums in another order
    views[:, 0, 1] = False
    hidden = ~shown(views, part.grid)
    other = torch.where(hidden[:, None], torch.rand(4, 3, 16, 16), pixels)
    assert torch.equal(part(pixels, views), part(other, views))
    assert not torch.equal(part(pixels, views), part(pixels, ~views | (torch.rand(views.shape[1:]) > 2)))


@pytest.mark.parametrize("hide", ["tokens", "pixels"])
def test_hidden_pixels_do_not_enter(hide: str) -> None:
    part = seen_part(vit(), hide)
    views = masks.square_masks(part.grid, Patch(4, 4), 2)
    pixels = torch.rand(len(views), 3, 16, 16)
    hidden = ~shown(views, part.grid)
    other = torch.where(hidden[:, None], torch.full_like(pixels, float("nan")), pixels)
    assert torch.equal(part(pixels, views), part(other, views))


class Company(nn.Module):
    """Logits that depend on the other images of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(x.flatten(1))
        return found + 1e-3 * found.mean(dim=0)


def test_passes_that_depend_on_their_company_need_a_lead() -> None:
    torch.manual_seed(0)
    part = GreyPixels(pixel_model(Company(), (1, 8, 8)), Grid(8, 8, (1, 1)))
    defence = DoubleMasking(part.grid, [Patch(2, 2)], 2)
    passes = Passes(part, defence.views, 4)
    assert passes.determinism.difference > 1e-5
    assert "measured" in passes.determinism.told(4)
    pixels = torch.rand(6, 1, 8, 8)
    leads = passes.answers(pixels, [(image, 0) for image in range(6)])
    assert [one.firm for one in leads] == [one.lead > passes.determinism.margin for one in leads]
    labels = [one.prediction for one in defence.predict(passes, pixels)]
    assert sum(bool(one.proven) for one in defence.certify(passes, pixels, labels)) > 0
    passes.determinism = type(passes.determinism)(1e3, 1)
    assert all(not one.proven for one in defence.certify(passes, pixels, labels))


def test_passes_without_finite_logits_give_no_class() -> None:
    """A patch that breaks every pass that sees it (here by NaN pixels) leaves the proven class."""
    part = GreyPixels(pixel_model(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), (1, 4, 5)), GRID)
    part.model.net[1].weight.data.zero_()
    for defence in (DoubleMasking(GRID, [Patch(1, 1)], 2), Voting(GRID, [Patch(1, 1)], "columns", 1, 3)):
        passes = Passes(part, defence.views, 4)
        (clean,) = defence.certify(passes, ONE_IMAGE, [int(part.model.net[1].bias.argmax())])
        assert clean.proven
        broken = ONE_IMAGE.clone()
        broken[0, 0, 1, 2] = float("nan")
        assert defence.predict(passes, broken)[0].prediction == clean.prediction
        everywhere = torch.full_like(ONE_IMAGE, float("nan"))
        seen_by_all = defence.certify(passes, everywhere, [0])[0]
        assert seen_by_all.proven == ()


class Counting(SeenPart):
    hides = "pixels"

    def forward(self, pixels: Tensor, views: Tensor) -> Tensor:
        self.rows = [*getattr(self, "rows", []), len(pixels)]
        logits: Tensor = self.model(pixels)
        return logits


def test_batches_always_have_one_size() -> None:
    part = Counting(pixel_model(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), (1, 4, 5)), GRID)
    defence = DoubleMasking(GRID, [Patch(2, 2)], 2)
    passes = Passes(part, defence.views, 4)
    defence.certify(passes, torch.rand(3, 1, 4, 5), [0, 1, 2])
    assert set(part.rows) == {4}


def test_networks_without_tokens_to_drop_say_so() -> None:
    net = pixel_model(timm.create_model("resnet10t", num_classes=5), (3, 32, 32))
    with pytest.raises(UsageError, match="neither timm's VisionTransformer"):
        seen_part(net, "tokens")
    part = seen_part(net, "auto")
    assert part.hides == "pixels"
    assert "VisionTransformer" in part.why


# a law: what is certified is never broken, at any place


class Bright(nn.Module):
    """Classes by smoothed brightness of parts of the image: robust here, not there."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 20, generator=generator))
        self.bias = nn.Parameter(torch.tensor([2.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.flatten(1) @ self.weight.T) + self.bias * 0.5


@pytest.mark.parametrize("name", ["double-masking", "voting"])
def test_no_patch_of_extreme_pixels_changes_a_certified_class(name: str) -> None:
    """Exhaustive: all 2 x 1 patches of black and white pixels, at all places, against the procedure itself."""
    attacked = kept = 0
    for seed in range(4):
        patch = Patch(2, 1)
        part = GreyPixels(pixel_model(Bright(seed), (1, 4, 5)), GRID)
        defence = (
            DoubleMasking(GRID, [patch], 2) if name == "double-masking" else Voting(GRID, [patch], "columns", 2, 3)
        )
        passes = Passes(part, defence.views, 16)
        images = torch.rand(6, 1, 4, 5, generator=torch.Generator().manual_seed(seed))
        labels = [one.prediction for one in defence.predict(passes, images)]
        for image, found in zip(images, defence.certify(passes, images, labels), strict=True):
            near = []
            for pixels in places(GRID, patch):
                for values in itertools.product((0.0, 1.0), repeat=2):
                    one = image.clone()
                    one[0, pixels] = torch.tensor(values)
                    near.append(one)
            now = [one.prediction for one in defence.predict(passes, torch.stack(near))]
            if found.proven:
                kept += 1
                assert set(now) == {found.prediction}
            else:
                attacked += set(now) != {found.prediction}
    assert kept > 0
    assert attacked > 0 or name == "voting"


# attacks


def places_of(patch: Patch, image: tuple[int, int]) -> list[tuple[int, int]]:
    return list(itertools.product(range(image[0] - patch.height + 1), range(image[1] - patch.width + 1)))


def test_a_patch_that_turns_the_network_is_found() -> None:
    """Four strong pixels in one corner: the attack finds that place, changes nothing else, and withstands elsewhere."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    net[1].weight.data.zero_()
    net[1].weight.data[1, [0, 1, 8, 9]] = 4.0  # of normalised pixels in [-1, 1]
    net[1].bias.data = torch.tensor([0.0, 8.0])
    model = pixel_model(net, (1, 8, 8))
    images = torch.zeros(2, 1, 8, 8)
    target = Target(lambda corner: model, lambda x: model(x).argmax(1).tolist())
    rows = attack_patches(target, [5, 6], images, [0, 0], Patch(2, 2), AttackSettings(steps=10))
    for row, image in zip(rows, images, strict=True):
        assert row.corner == (0, 0)
        assert row.adversarial is not None
        changed = (row.adversarial != image).nonzero()[:, 1:]
        assert bool((changed < 2).all())
        assert target.classify(row.adversarial[None]) == [1]
    assert attack_patches(target, [0], images[:1], [1], Patch(2, 2), AttackSettings())[0].withstood is False
    inner = attack_patches(target, [0], images[:1], [0], Patch(2, 2), AttackSettings(steps=10), places=[(3, 3)])
    assert inner[0].withstood


@pytest.mark.parametrize("name", ["double-masking", "voting"])
def test_no_adaptive_attack_breaks_what_is_certified(certified: Checkpoint, name: str) -> None:
    """At every place: PGD on the passes that see the patch, judged by the procedure itself."""
    from certcli.images import datasets

    hide = "pixels" if name == "double-masking" else "auto"  # its flat head wants all tokens
    given = Patches(["1"], name, hide=hide, band_width=1, bands="blocks")
    certifier = prepare("patch", certified, CPU, given)
    assert isinstance(certifier, PatchCertifier)
    patch, images = Patch(1, 1), datasets.load("digits", certified.record.input, "test").select(range(24))
    pixels, labels = images.tensors()
    rows = certifier.batch(range(24), pixels, labels.tolist())
    target = Target(lambda corner: TouchedPasses(certifier, patch, corner), certifier.predict)
    chosen = places_of(patch, (8, 8))[::9]
    found = attack_patches(target, range(24), pixels, labels.tolist(), patch, AttackSettings(steps=8), chosen)
    held = [row.index for row in rows if row.holds_at(patch)]
    assert [row.index for row in found if row.index in held and not row.withstood] == []
    assert held
