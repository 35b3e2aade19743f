"""certvit attack: the empirical upper bound, judged by us."""

from certcli.certify.options import Patches
from certcli.cli.attack.options import AttackedImages, AttackOutput, Attacks
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Output, Source, Talk


@command(
    "certvit attack m.safetensors -a pgd -a margin-pgd --restarts 3 -e 36/255 --records attacked.jsonl",
    "certvit attack m.safetensors --only-certified certified.jsonl -a margin-pgd",
    "certvit attack m.safetensors --norm patch --patch 32 --defence patch",
    page="attack.md",
    often=(
        "attacks",
        "listed",
        "preset",
        "epsilon",
        "norm",
        "only_certified",
        "minimum",
        "records",
        "resume",
        "gallery",
    ),
    panels={"patch": "Patches"},
)
def attack(
    source: Source,
    attacks: Attacks = Attacks(),
    data: AttackedImages = AttackedImages(),
    patches: Patches = Patches(),
    machine: BatchDevice = BatchDevice(),
    results: AttackOutput = AttackOutput(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Attack images: the accuracy under attack, an upper limit on any certified accuracy."""
    from certcli.cli.attack import run

    run.report_attacks(source, attacks, data, patches, machine, results, output, talk)
