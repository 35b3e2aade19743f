"""What Python's functions take: docs/api.md lists it, and options are fields of the rooms' own. Bounds of
logits and margins: no image of the neighbourhood leaves them, and they say what certificates say.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import certvit
import certvit.testing
from certcli import api
from certcli.api import door, options
from certcli.api.arguments import fields_of
from certcli.attack.settings import AttackSettings
from certcli.audit.plan import AuditPlan
from certcli.certify import logit_bounds
from certcli.certify import logit_bounds as logit_bounds_module
from certcli.certify.methods import METHODS, Method, options_of_method
from certcli.certify.options import Patches
from certcli.evaluation.threat import Norm
from certcli.models.in_memory import open_module
from certcli.models.pixels import PixelModel
from certcli.system.errors import UsageError
from tests.enclosure.test_zonotope_networks import network as vision_transformer
from tests.helpers.grids import EVERY, crossed

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(certvit, name) for name in api.FUNCTIONS},
    **{name: getattr(certvit.testing, name) for name in certvit.testing.__all__ if name[0] == "a"},
}
OPTIONS: dict[str, tuple[Any, Any, set[str]]] = {
    "predict": (Patches, options.PatchOptions, {"hide"}),
    "attack": (AttackSettings, options.AttackOptions, {"classes", "restart"}),
    "audit": (AuditPlan, options.AuditOptions, {"gates", "budget"}),
    **{
        name: (type(options_of_method(name, {})), options.CertifyOptions, set())
        for name in get_args(Method)
    },
}
"""The class of the options, what a caller may set of it, and what the functions set themselves."""
OPTIONS["patch"][2].add("hide")
OPTIONS["smoothing"][2].update(("batch_size", "denoiser", "denoiser_file", "denoiser_module"))
WIDER: dict[Any, tuple[Any, ...]] = {
    options.Radii: (Sequence[float], tuple[float, ...]),
    options.Words: (list[str], tuple[str, ...]),
    options.Radius: (float,),
    options.Radius | None: (float | None,),
    str | Path | None: (Path | None,),
}
"""Types of keyword arguments -> those of the fields that they are read into."""


def test_the_names_of_methods_are_those_of_the_registry() -> None:
    assert list(get_args(Method)) == METHODS.names()


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_the_fields_of_the_room(name: str) -> None:
    kind, offered, internal = OPTIONS[name]
    chosen = fields_of(kind, offered)
    assert {*chosen.values(), *internal} == {item.name for item in fields(kind)}
    types = get_type_hints(kind)
    for keyword, hint in get_type_hints(offered).items():
        if keyword in chosen:
            assert types[chosen[keyword]] in (hint, *WIDER.get(hint, ())), keyword
    rows = re.findall(
        r"^\| (.*) \| (.*) \|$",
        PAGE.partition("| options of |")[2].partition("\n\n")[0],
        re.MULTILINE,
    )
    (names,) = [row[1] for row in rows if name in re.findall(r"[\w-]+", row[0])]
    assert set(re.findall(r"`(\w+)`", names)) == set(chosen)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_page_shows_each_signature(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}\((.*?)\)` \|", PAGE, re.MULTILINE)
    parameters = [
        one.replace(annotation=one.empty)
        for one in inspect.signature(FUNCTIONS[name]).parameters.values()
    ]
    assert f"({row})" == str(inspect.Signature(parameters)).replace("'", '"')


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_call_says_what_to_pass(name: str) -> None:
    """A misspelled name the nearest one, a lacking or superfluous argument the form of the call."""
    signature = door.Signature(FUNCTIONS[name])
    for known in (*signature.names, *signature.options):
        with pytest.raises(UsageError, match=f"{name} has no option '{known}x'") as refusal:
            FUNCTIONS[name](**{f"{known}x": 1})
        assert f"did you mean '{known}'" in refusal.value.hint
    for arguments in ((), (1,) * 20):
        with pytest.raises(UsageError, match=f"^{name}: ") as refusal:
            FUNCTIONS[name](*arguments)
        assert refusal.value.hint.startswith(f"{name}({signature.names[0]}")


KINDS = ("plain", "mean", "relu", "perceptron")
RADII = (0.0, 0.02)


def model_of(kind: str) -> PixelModel:
    if kind != "perceptron":
        return vision_transformer(kind)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    return certvit.network(open_module(module, 0.5, 0.5, (1, 4, 4)))


def neighbours(image: Tensor, radius: float, norm: Norm, count: int = 64) -> Tensor:
    """Return images of [0, 1] within the radius, some at its edge, along a few steep directions as
    well.
    """
    moves = torch.randn(count, *image.shape, dtype=torch.float64)
    moves[::4] = moves[::4].sign()
    lengths = moves.flatten(1).norm(dim=1) if norm == "l2" else moves.flatten(1).abs().amax(1)
    moves = moves / lengths.view(-1, 1, 1, 1) * radius
    return (image + moves).clamp(0, 1)


@pytest.mark.parametrize(("kind", "norm"), crossed(KINDS, ["l2", "linf"]))
def test_no_neighbour_leaves_the_bounds(kind: str, norm: Norm) -> None:
    model = model_of(kind)
    exact = certvit.network(model, double=True)
    images = torch.rand(1, 1, 4, 4)
    images[:, :, 0] = images[:, :, 0].round()
    for radius in RADII if EVERY or kind == "perceptron" else RADII[1:]:
        results = [
            certvit.bounds(model, images, radius, norm=norm, method=name)
            for name in logit_bounds.METHODS
        ]
        for row, image in enumerate(images.double()):
            with torch.no_grad():
                logits = exact(neighbours(image, radius, norm))
            for bounds in results:
                label = int(bounds.classes[row])
                margins = logits[:, label : label + 1] - logits
                slack = 1e-12 * logits.abs().max()  # the logits here are rounded themselves
                assert bool((logits >= bounds.lower[row] - slack).all())
                assert bool((logits <= bounds.upper[row] + slack).all())
                assert bool((margins >= bounds.margin_lower[row] - slack).all())
                assert bool((margins <= bounds.margin_upper[row] + slack).all())
        best = results[0]
        others = results[1:]
        assert torch.equal(best.lower, torch.stack([one.lower for one in others]).amax(0))
        assert torch.equal(best.upper, torch.stack([one.upper for one in others]).amin(0))


def test_bounds_are_finite_and_grow_with_the_radius() -> None:
    for kind in ("plain", "perceptron"):
        model = model_of(kind)
        images = torch.rand(1, 1, 4, 4)
        several = [certvit.bounds(model, images, radius) for radius in (0, "1/255", 0.02)]
        widths = [bounds.upper - bounds.lower for bounds in several]
        assert bool(torch.isfinite(widths[-1]).all())
        assert bool((widths[0] < 1e-6).all())
        assert bool((widths[0] < widths[1]).all())
        assert bool((widths[1] < widths[2]).all())


def test_a_network_without_theorem_has_infinite_bounds() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).cumsum(1)[:, :3].div(9).erfinv()

    bounds = certvit.bounds(
        certvit.load(Sorted(), mean=0, std=1, input_size=(1, 2, 2)), torch.rand(1, 1, 2, 2), 0.1
    )
    assert bounds.methods == ()
    assert bool(bounds.upper.isinf().all())
    assert len(bounds.why) == 2
    assert not bool(bounds.in_top(2).any())


def test_a_bound_that_is_not_known_is_infinite() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    for unknown in (-math.inf, math.inf):
        found = logit_bounds_module._known_values(values, unknown)
        assert found.tolist() == [unknown, math.inf, -math.inf, 1.0]


def test_the_top_classes_are_counted() -> None:
    model = model_of("perceptron")
    images = torch.rand(8, 1, 4, 4)
    logits = certvit.network(model)(images)
    for place in range(4):
        labels = logits.argsort(dim=1, descending=True)[:, place]
        still = certvit.bounds(model, images, 0, labels)
        assert still.in_top(place + 1).all()
        assert place == 0 or not still.in_top(place).any()
        assert certvit.bounds(model, images, 10, labels).in_top(4).all()
    certificates = certvit.certify(model, images, logits.argmax(1), arithmetic="real")
    within = certvit.bounds(model, images, 0.01).in_top()
    assert all(bool(fine) for fine, one in zip(within, certificates) if one.radius > 0.0101)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_of_margins_the_rounding_of_both_logits_counts(
    norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the radius of a ball that holds the neighbourhood."""
    calls: list[tuple[float, Tensor]] = []
    reach = logit_bounds_module._slope_reach

    def seen(slope: Any, radius: float, errors: Tensor, values: Tensor) -> Tensor:
        calls.append((radius, errors))
        return reach(slope, radius, errors, values)

    monkeypatch.setattr(logit_bounds_module, "_slope_reach", seen)
    near = logit_bounds.Neighbourhood(0.1, norm, logit_bounds.GLOBAL)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    checkpoint = open_module(module, 0.5, 0.5, (1, 4, 4))
    pixels = torch.rand(2, 1, 4, 4)
    logit_bounds_module.logit_bounds(checkpoint, pixels, None, near, torch.device("cpu"))
    (radius, errors), (of_margins, of_both) = calls
    classes = certvit.network(checkpoint, double=True)(pixels.double()).argmax(1)
    others = torch.nn.functional.one_hot(classes, 4) == 0
    assert bool((errors > 0).all())
    assert bool((of_both[others] > 0).all())
    assert bool((of_both <= 2 * errors).all())
    for each in (radius, of_margins):
        assert Fraction(each) ** 2 >= Fraction(0.1) ** 2 * (
            1 if norm == "l2" else pixels[0].numel()
        )
