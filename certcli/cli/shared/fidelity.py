"""The headline of `constrain` and `adapt`: agreement with the original on other images."""

from collections.abc import Mapping
from typing import Any

from certcli.checkpoint.record import Record
from certcli.cli.shared.output import Sink
from certcli.evaluation.fidelity import (
    Fidelity,
    ReferenceLogits,
    expected_on_real,
    known_labels,
)
from certcli.evaluation.threat import percent_ends
from certcli.images import calibration, labelled
from certcli.models.pixels import PixelModel


def measure_reference(
    model: PixelModel,
    images: labelled.Images,
    held_out: labelled.Images,
    record: Record,
    batch_size: int,
    sink: Sink,
) -> ReferenceLogits:
    """Return the original logits of the held-out images; of all images where none is held out."""

    judges = held_out if len(held_out) else images
    if not len(held_out):
        sink.warn(
            f"{len(images)} images are too few to hold any out: the agreement is measured on the "
            "calibration images"
        )
    labels, why = known_labels(judges, record)
    if why:
        sink.note(f"accuracy is not measured: {why}")
    reference = ReferenceLogits(model, judges, labels, batch_size)
    for doubt in reference.doubts(record):
        sink.warn(doubt)
    return reference


def fidelity_document(
    reference: ReferenceLogits,
    model: PixelModel,
    record: Record,
    took_part: bool,
    fidelity: Fidelity | None = None,
    refitted: bool = False,
) -> dict[str, Any]:
    """Return the JSON form of the comparison with `model`, or of `found`.

    Args:
        refitted: new parts were fitted to these images, so that they say little about others.
    """

    images = reference.images
    # trained_on: the record names these images
    trained = images.split == "train" and record.dataset in (images.name, f"torch/{images.name}")
    about = {
        "dataset": images.name,
        "split": images.split,
        "took_part": took_part,
        "trained_on": trained,
    }
    fidelity = reference.compare(reference.logits(model)) if fidelity is None else fidelity
    document = {**fidelity.to_json(), **about}
    if images.name == calibration.PHOTOGRAPHS:
        document.pop("agreement_at_least")
        document |= {} if refitted else expected_on_real(fidelity, record.input.size[0])
    return document


def show_fidelity(record: Mapping[str, Any], sink: Sink) -> None:
    images = "calibration images" if record["took_part"] else "held-out images"
    uses = ["used to choose eta"] if record.get("chose") else []
    uses += ["seen in training"] if record["trained_on"] else []
    where = f"{images} of {record['dataset']} ({', '.join([record['split'], *uses])})"
    share = share_between(record["agreement"], record["agreement_interval"])
    sink.text(
        f"agreement with the original on {record['images']} {where}: same top-1 {share}, "
        f"relative logit error {100 * record['logits_error']:.1f} %"
    )
    if record.get("chose") and record["dataset"] != "synthetic photographs":
        sink.text(
            f"estimated from the margins of these images: at least {100 * record['agreement_at_least']:.1f} % of similar "
            "images keep their top-1 prediction"
        )
    if record["dataset"] == "synthetic photographs":
        sink.note(
            "synthetic photographs have no class, so their top-1 predictions are near ties: --dataset measures the agreement "
            "on real images"
        )
        if "agreement_at_least" in record:
            share = 100 * record["agreement_at_least"]
            error = 100 * record["logits_error_at_most"]
            sink.text(
                f"expected on real images, from measured networks: same top-1 at least {share:.1f} %, "
                f"relative logit error at most {error:.1f} %"
            )
        else:
            sink.warn(
                "synthetic photographs do not show the effect of such a change on real images: "
                "use --dataset with images like yours"
            )
    if record["accuracy_after"] is not None:
        names = ("accuracy_before", "accuracy_after")
        before, after = (share_between(record[name], record[f"{name}_interval"]) for name in names)
        sink.text(f"accuracy on them: {before} -> {after}")


def share_between(share: float, interval: list[float]) -> str:
    """Format a share with its 95 % interval: \"79.0 % (70 to 86)\"."""
    return f"{100 * share:.1f} % ({percent_ends((interval[0], interval[1]), 0)})"
