"""Laws over all attacks: none lies below the exact distance, strong ones reach it, the model is
left as it was.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from certcli.attack import catalogue, checks, run, watched_model
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Norm, Region, image_norms
from tests.helpers import attack_nets, grids


@pytest.mark.parametrize(("name", "norm"), attack_nets.CASES)
def test_no_attack_succeeds_below_the_exact_distance(name: str, norm: Norm) -> None:
    """Of images with inner pixels, and with all pixels at 0 and 1."""
    model = attack_nets.linear_classifier(5)
    images = torch.cat(
        [attack_nets.random_pictures(5), attack_nets.random_pictures(5, seed=2).round()]
    )
    labels = attack_nets.labelled(model, images)
    distance = attack_nets.exact_distances(model, images, labels, norm)
    radius = float(distance.median())
    for record in run.attack_images(
        model,
        attack_nets.batches(images, labels, 10),
        [name],
        Region(norm, radius),
        attack_nets.SHORT,
    ):
        if record.norm is not None:
            assert distance[record.index] * (1 - attack_nets.ROUNDING) <= record.norm <= radius
        assert record.withstood or distance[record.index] <= radius


# Attacks that follow the likeliest class cannot know the nearest one, so theirs is the net of two
# classes. FGSM is one step and Square a random search: sharpness is not claimed for them. 5 % is
# the project's goal.
SHARP = [
    *(
        (name, norm, 2)
        for name in ("pgd", "eot-pgd", "margin-pgd", "apgd-ce", "apgd-dlr")
        for norm in attack_nets.NORMS
    ),
    *(
        (name, norm, 5)
        for name in ("apgd-t", "fab", "autoattack", "autoattack-full")
        for norm in attack_nets.NORMS
    ),
    ("cw", "l2", 2),
]


@pytest.mark.parametrize(("name", "norm", "classes"), SHARP)
def test_strong_attacks_reach_the_exact_distance(name: str, norm: Norm, classes: int) -> None:
    model = attack_nets.linear_classifier(classes)
    images = attack_nets.random_pictures(4)
    images[2:] = images[2:].round()
    labels = attack_nets.labelled(model, images)
    distance = attack_nets.exact_distances(model, images, labels, norm)
    settings = AttackSettings(steps={"cw": None, "fab": 20}.get(name, 40), queries=40)
    region = Region.each(norm, (1.05 * distance).tolist())
    assert region.own.max() > 1.5 * region.own.min()  # each image has a radius of its own
    for record in run.attack_images(
        model, attack_nets.batches(images, labels), [name], region, settings
    ):
        row = record.index
        assert record.epsilon == float(1.05 * distance[row])
        assert not record.withstood, (row, float(distance[row]))
        assert record.norm <= record.epsilon


# the fewest classes for every attack, and the other networks in turn
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "perceptron-2") for case in attack_nets.CASES),
        *grids.crossed(
            [(n, m) for n, m in attack_nets.CASES if m == "l2"], [*attack_nets.MODELS][1:]
        ),
    ],
)
def test_every_attack_on_every_net(case: tuple[str, Norm], kind: str) -> None:
    """Successes flip the label inside ball and box, misclassified images stay themselves, a seed
    fixes all of it.
    """
    (name, norm), model = case, attack_nets.MODELS[kind]
    images = torch.cat(
        [attack_nets.random_pictures(3), attack_nets.random_pictures(3, seed=2).round()]
    )
    labels = attack_nets.labelled(model, images, wrong=2)
    region = Region(norm, 0.3 if norm == "l2" else 0.05)
    settings = replace(attack_nets.SHORT, seed=7)
    runs = [
        list(
            run.attack_images(
                model,
                attack_nets.batches(images, labels, 6),
                [name],
                region,
                settings,
                keep_images=True,
            )
        )
        for _ in range(2)
    ]
    assert [record.index for record in runs[0]] == list(range(6))
    for record, again in zip(*runs, strict=True):
        assert record == again
        assert torch.equal(record.adversarial, again.adversarial)
        image = record.image[None]
        adversarial = record.adversarial[None]
        assert region.contains(adversarial, image).all()
        if record.index < 2:
            assert (record.robust[name], record.norm, record.broken_by) == (False, 0.0, None)
            assert torch.equal(adversarial, image)
            assert record.adversarial_prediction == record.prediction != record.label
        elif record.withstood:
            assert (record.norm, record.l2, record.broken_by) == (None, None, None)
            assert record.adversarial_prediction == record.prediction == record.label
        else:
            assert record.broken_by == name
            assert record.adversarial_prediction != record.prediction == record.label
            assert record.norm == float(image_norms(adversarial.double() - image.double(), norm))
            with torch.no_grad():
                assert int(model(adversarial).argmax()) == record.adversarial_prediction
        json.dumps(record.to_json())


@pytest.mark.parametrize("name", attack_nets.GENERAL)
def test_an_attack_leaves_no_trace(name: str) -> None:
    """Modes, buffers, gradients, requires_grad, the caller's tensors and the global random numbers
    are as before.
    """
    model = attack_nets.small_convolution(4)
    model[0][0].weight.requires_grad_(False)
    model[1].weight.grad = torch.ones_like(model[1].weight)
    model[0][1].track_running_stats = True
    model[0][4].train()  # a part that the caller has left in training mode on purpose
    images = attack_nets.random_pictures(5)
    labels = attack_nets.labelled(model, images)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    kept = images.clone(), labels.clone()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.no_grad(), watched_model.undisturbed(model, images, 0):
        assert torch.is_grad_enabled()
    craft = catalogue.ATTACKS.load(name)
    with torch.no_grad():
        craft(model, images, labels, Region("l2", 0.2), attack_nets.SHORT)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert torch.equal(model[1].weight.grad, torch.ones_like(model[1].weight))
    assert model[0][0].weight.grad is None
    assert model[1].bias.grad is None
    assert torch.equal(images, kept[0])
    assert torch.equal(labels, kept[1])


@pytest.mark.parametrize(
    ("name", "restart"),
    [
        (name, 1 if name in ("pgd", "fab") else 0)
        for name in attack_nets.GENERAL
        if catalogue.ATTACKS[name].random and name != "margin-pgd"
    ],
)
def test_another_seed_is_another_run(name: str, restart: int) -> None:
    """pgd and FAB draw in restarts only, margin-pgd once its targets are used up."""
    model = attack_nets.small_perceptron(5)
    images = attack_nets.random_pictures(6)
    labels = attack_nets.labelled(model, images)
    craft = catalogue.ATTACKS.load(name)
    settings = replace(attack_nets.SHORT, stop_early=False, restart=restart)
    first, second = (
        craft(model, images, labels, Region("l2", 2.0), replace(settings, seed=s)) for s in (0, 1)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("norm", "share"), [("l2", 0.02), ("linf", 0.08)])
def test_steps_that_fall_reach_what_steps_of_one_length_leap_over(norm: Norm, share: float) -> None:
    """The second class wins within a small share of the radius around a point of the ball."""
    images = attack_nets.random_pictures(3) * 0.4 + 0.3
    radius = 0.2
    target = Region(norm, 0.7 * radius).random_point(images, torch.Generator().manual_seed(3))
    label = torch.zeros(1, dtype=torch.long)
    robust = {}
    for choice in (None, 2.5):
        settings = AttackSettings(steps=40, relative_step=choice)
        rows = [
            record
            for row in range(len(images))
            for record in run.attack_images(
                attack_nets.hole_around(target[row], share * radius).eval(),
                attack_nets.batches(images[row : row + 1], label, 1),
                ["pgd"],
                Region(norm, radius),
                settings,
            )
        ]
        robust[choice] = sum(record.withstood for record in rows)
    assert robust[None] < robust[2.5]


OF_THE_SOFTMAX = ("fgsm", "eot-pgd", "apgd-ce", "autoattack", "autoattack-full")
"""Attacks that are published for the softmax of the logits as they are: of two classes only is its direction the margin's."""
SCALE_FREE = [
    (name, norm, 2 if name in OF_THE_SOFTMAX else 4)
    for name, norm in attack_nets.CASES
    if name != "cw"  # weighs the margin against the distance
]


@pytest.mark.parametrize(("name", "norm", "classes"), SCALE_FREE)
def test_the_scale_of_the_logits_decides_nothing(name: str, norm: Norm, classes: int) -> None:
    """Powers of two scale without rounding, so verdicts and norms are the same to the last bit. At
    the largest the softmax is exactly 1.
    """
    images = attack_nets.random_pictures(10)
    smallest = 0.02 if norm == "l2" else 0.004
    region = Region.each(norm, [smallest * 2.0**row for row in range(len(images))])
    nets = [
        attack_nets.scaled_logits(factor, classes).eval() for factor in (1.0, 2.0**-10, 2.0**17)
    ]
    for net in nets:  # no class is far away
        net.parts[0][-1].bias.data -= net.parts[0](images).mean(dim=0)
    data = attack_nets.batches(images, attack_nets.labelled(nets[0], images), len(images))
    runs = [list(run.attack_images(net, data, [name], region, attack_nets.SHORT)) for net in nets]
    assert 0 < sum(record.withstood for record in runs[0]) < len(images)
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("name", ["pgd", "margin-pgd"])
@pytest.mark.parametrize("steps", [10, 20, 50])
def test_an_ascent_spends_its_steps_and_aims_at_the_likeliest_classes(
    name: str, steps: int
) -> None:
    """Each stretch values its last point, too. The winner is class 2, not the likeliest: a pit that
    only the margin to it leads to.
    """
    images = torch.full((1, 1, 4, 4), 0.5)
    model = attack_nets.unreached_favourite().eval()
    with torch.no_grad():
        assert model(images).topk(3).indices.tolist() == [[0, 1, 2]]
    passes: list[bool] = []
    model.register_forward_hook(lambda _, __, output: passes.append(output.requires_grad))
    settings = AttackSettings(steps=steps, stop_early=False, classes=3)
    label = torch.zeros(1, dtype=torch.long)
    point = catalogue.ATTACKS.load(name)(model, images, label, Region("l2", 1.0), settings)
    stretches = len(passes) - steps
    assert 1 < stretches <= 1 + 6
    passes.clear()
    catalogue.ATTACKS.load(name)(
        model, images, label, Region("l2", 1.0), replace(settings, relative_step=2.5)
    )
    assert len(passes) == steps + 1
    assert int(model(point).argmax()) == 2


def test_transfer_crafts_on_one_net_and_tests_on_another() -> None:
    model = attack_nets.small_perceptron(4)
    source = attack_nets.small_perceptron(4, seed=5)
    images = attack_nets.random_pictures(10)
    labels = attack_nets.labelled(model, images)
    calls: list[bool] = []
    model.register_forward_hook(lambda _, __, output: calls.append(output.requires_grad))
    for name in ("pgd", "autoattack"):
        records = list(
            run.attack_images(
                model,
                attack_nets.batches(images, labels),
                [name],
                Region("l2", 0.5),
                attack_nets.SHORT,
                source=source,
            )
        )
        assert len(records) == 10
    seen: list[int] = []
    source.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    list(
        run.attack_images(
            model,
            attack_nets.batches(images, labels, 10),
            ["pgd-9"],
            Region("l2", 2.0),
            attack_nets.SHORT,
            source=source,
        )
    )
    # after one image, which tells the number of classes, no row rests when the source is fooled:
    # that says nothing about the tested net
    assert seen == [1] + [10] * 10
    assert not any(calls)  # the tested net is only ever asked, never differentiated


def test_random_nets_are_attacked_and_judged_on_averages() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = attack_nets.small_perceptron(3)

        def forward(self, images: Tensor) -> Tensor:
            logits = self.net(images)
            return logits + 0.1 * torch.randn_like(logits)

    model = Noisy().eval()
    images = attack_nets.random_pictures(8)
    labels = attack_nets.labelled(model.net, images)
    torch.manual_seed(0)  # the verdict draws from the caller's generator, as the net itself does
    settings = AttackSettings(steps=10, samples=8)
    for norm, radius in (("l2", 1.5), ("linf", 0.3)):
        summary = run.robust_accuracy(
            run.attack_images(
                model,
                attack_nets.batches(images, labels),
                ["eot-pgd"],
                Region(norm, radius),
                settings,
            )
        )
        assert summary.robust < summary.clean
    first = checks.first_pass(model, images, labels)
    flags = {
        flag.check.name: flag.raised for flag in checks.inspect_model(model, images, labels, first)
    }
    assert flags == {"probabilities": False, "zero gradients": False, "randomness": True}


def test_radius_zero_and_empty_batches() -> None:
    model = attack_nets.small_perceptron(3)
    images = attack_nets.random_pictures(4)
    labels = attack_nets.labelled(model, images)
    for name in attack_nets.GENERAL:
        (summary,) = run.robust_curve(
            run.attack_images(
                model,
                attack_nets.batches(images, labels),
                [name],
                Region("l2", 0.0),
                attack_nets.SHORT,
            )
        )
        assert summary.robust == summary.clean == 1.0
        assert catalogue.ATTACKS.load(name)(
            model, images[:0], labels[:0], Region("l2", 0.1), attack_nets.SHORT
        ).shape == (0, 1, 6, 6)
