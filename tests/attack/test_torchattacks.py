"""Attacks of torchattacks by name: what they find lies in the ball and is judged anew, and their
arguments are checked.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from certcli.attack.catalogue import ATTACKS, signature, torchattacks_library, torchattacks_names
from certcli.attack.run import attack_images
from certcli.attack.settings import AttackSettings, planned_attacks
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import evidence, image_records, perturbation
from certcli.system.errors import UsageError
from tests.helpers import attack_nets, commands

try:
    torchattacks_library()
except UsageError as missing:
    pytest.skip(f"{missing.message}: {missing.hint}", allow_module_level=True)

AVAILABLE = [name for name in torchattacks_names() if not signature(name).missing]
SHORT = {
    **dict.fromkeys(
        ("steps", "num_iter_set", "nb_iter", "restarts", "binary_search_steps", "eot_iter"), 2
    ),
    **dict.fromkeys(("max_iterations", "popsize", "n_queries"), 10),
    "nb_sample": 4,
    "max_batch_size": 4,
    "gamma": 0.02,
}


@pytest.fixture(scope="module")
def colour() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 10)
    ).eval()
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return model, images, attack_nets.labelled(model, images)


def short(name: str) -> str:
    chosen = [f"{key}={value}" for key, value in SHORT.items() if key in signature(name).arguments]
    return ",".join([f"torchattacks:{name}", *chosen])


@pytest.mark.parametrize(
    ("name", "norm"), [(name, norm) for name in AVAILABLE for norm in signature(name).norms]
)
def test_found_images_lie_in_the_ball_are_judged_anew_and_follow_the_seed(
    colour: tuple[nn.Module, torch.Tensor, torch.Tensor], name: str, norm: perturbation.Norm
) -> None:
    model, images, labels = colour
    region, settings = (
        perturbation.Region(norm, 1.5 if norm == "l2" else 0.1),
        AttackSettings(seed=3),
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    drawn = torch.get_rng_state()

    def run() -> list[image_records.AttackRecord]:
        batch = [(torch.arange(2), images, labels)]
        return list(attack_images(model, batch, [short(name)], region, settings, keep_images=True))

    np.random.seed(5)
    records = run()
    assert np.random.random() == np.random.RandomState(5).random_sample()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.rand(1)  # the second run begins with other numbers of the caller
    for record, again in zip(records, run(), strict=True):
        assert record == again
        assert torch.equal(record.adversarial, again.adversarial)
        assert region.contains(record.adversarial[None], record.image[None]).all()
        with torch.no_grad():
            assert int(model(record.adversarial[None]).argmax()) == record.adversarial_prediction
        assert record.fell is (record.adversarial_prediction != record.label)


def test_most_attacks_find_something(colour: tuple[nn.Module, torch.Tensor, torch.Tensor]) -> None:
    """A wrong call would leave the images as they are, which the law over all attacks lets pass."""
    model, images, labels = colour
    region = perturbation.Region("linf", 0.2)
    for name in ("PGD", "APGD", "Jitter", "FAB", "MIFGSM"):
        batch = [(torch.arange(2), images, labels)]
        assert all(
            row.fell
            for row in attack_images(
                model, batch, [f"torchattacks:{name}"], region, AttackSettings()
            )
        )


def test_a_failure_of_the_library_is_one_line() -> None:
    """TIFGSM blurs with three kernels, whatever the number of channels."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    images = torch.rand(1, 1, 8, 8)
    batch = [(torch.arange(1), images, attack_nets.labelled(model, images))]
    with pytest.raises(UsageError, match="torchattacks:TIFGSM fails on these images: RuntimeError"):
        list(
            attack_images(
                model,
                batch,
                ["torchattacks:TIFGSM"],
                perturbation.Region("linf", 0.1),
                AttackSettings(),
            )
        )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("torchattacks:Jiter", "did you mean 'Jitter'"),
        ("torchattacks:", "no attack ''"),
        ("torchattacks:MultiAttack", "needs attacks"),
        ("torchattacks:LGV", "needs trainloader"),
        ("torchattacks:PGD,speed=3", "no argument of PGD"),
        ("torchattacks:PGD,steps", "no argument of PGD"),
        ("torchattacks:PGD,steps=3,steps=4", "no argument of PGD"),
        ("torchattacks:PGD,steps=2.5", "steps cannot be '2.5'"),
        ("torchattacks:PGD,steps=0", "steps cannot be '0'"),
        ("torchattacks:PGD,alpha=far", "alpha cannot be 'far'"),
        ("torchattacks:PGD,alpha=nan", "alpha cannot be 'nan'"),
        ("torchattacks:PGD,random_start=1", "true or false"),
        ("torchattacks:PGD,eps=0.1", "follows --epsilon"),
        ("torchattacks:APGD,norm=L1", "follows --epsilon"),
        ("torchattacks:UPGD,loss=m/s", "it is a word"),
        ("torchattacks:Pixle,x_dimensions=2:b", "x_dimensions cannot be"),
    ],
)
def test_arguments_are_checked_before_any_work(text: str, told: str) -> None:
    with pytest.raises(UsageError) as refusal:
        planned_attacks([text], AttackSettings())
    assert told in f"{refusal.value.message} {refusal.value.hint}"


def test_one_attack_has_one_spelling() -> None:
    """The label of records and tables: arguments typed, in the order of the signature."""
    (plan,) = planned_attacks(
        ["torchattacks:PGD,steps=20/2,alpha=4/8,random_start=False"], AttackSettings()
    )
    assert plan.label == "torchattacks:PGD,alpha=0.5,steps=10,random_start=false"
    assert ATTACKS[plan.label].name == plan.label
    assert (
        ATTACKS["torchattacks:Pixle,x_dimensions=2:4"].name == "torchattacks:Pixle,x_dimensions=2:4"
    )


def test_the_command_writes_records_and_evidence_like_any_other(
    workshop: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o.safetensors"
    path = tmp_path / "r.jsonl"
    words = (
        "attack",
        workshop / "plain.safetensors",
        "-a",
        "torchattacks:Jitter,steps=3",
        "--norm",
        "linf",
    )
    words = (*words, "-e", "8/255", "--limit", 12, "--no-checks", "--records", path)
    found = commands.document(*words, "-o", out)
    (label,) = found["attacks"]
    assert label == "torchattacks:Jitter,steps=3"
    rows = commands.record_lines(path)
    assert found["robust"] == sum(row["robust"][label] is True for row in rows) / 12
    assert (
        evidence.decode_evidence(Checkpoint.read(out).record.evidence[-1]).result.robust
        == found["robust"]
    )
    again = commands.document(*words, "--resume")
    assert {**again, "resumed": None} == {**found, "resumed": None}
    assert again["resumed"]["computed_again"] == 12
    other = commands.attempt("attack", workshop / "plain.safetensors", "-a", "torchattacks:Jitter")
    assert isinstance(other.exception, UsageError)
    assert "attack in linf, not in l2" in other.exception.message


def test_the_list_shows_every_attack_with_its_arguments_and_norms() -> None:
    shown = " ".join(commands.certvit("attack", "--list").stdout.split())
    assert all(
        f"{name} " in shown
        for name in (*ATTACKS.names(), *(f"torchattacks:{name}" for name in torchattacks_names()))
    )
    assert "torchattacks:FFGSM linf linf alpha=1.25*radius" in shown
    assert "it needs trainloader" in shown


def test_without_torchattacks_everything_else_works(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchattacks", None)
    words = ("attack", workshop / "plain.safetensors", "-e", 0.1, "--limit", 4, "--no-checks")
    commands.document(*words, "-a", "pgd-5")
    failure = commands.attempt(*words, "--norm", "linf", "-a", "torchattacks:Jitter").exception
    assert isinstance(failure, UsageError)
    assert "pip install --no-deps torchattacks" in failure.hint
    assert "torchattacks, which is not installed" in commands.certvit("attack", "--list").stdout
