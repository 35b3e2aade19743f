"""Certificates of an earlier run, before a result rests on them: each is one that its run can
state, some are found again.
"""

from collections.abc import Sequence

from certcli.certify.certificate import Certificate, Certifier
from certcli.certify.recheck import plainly_wrong
from certcli.evaluation.resumed import Demanded, Resumed, to_compute_again, usual
from certcli.evaluation.threat import Threat
from certcli.images.labelled import Images
from certcli.system.errors import DataError

HINT = "it was edited, or written on a machine that computes otherwise: leave out --resume"


def require_possible(claims: Sequence[Certificate], certifier: Certifier, where: str) -> None:
    """DataError for a record that states what no run of this method and these parameters does.
    Labels are known to agree.
    """
    for claim in claims:
        confirmation = plainly_wrong(claim, claim.label, certifier)
        if confirmation is not None and confirmation.status == "refuted":
            raise DataError(
                f"the record of image {claim.index} in {where} is false: {confirmation.why}", HINT
            )


def find_again(
    certifier: Certifier,
    claims: Sequence[Certificate],
    images: Images,
    threat: Threat,
    demanded: Demanded,
    batch_size: int,
    where: str,
) -> Resumed:
    """Compute some of the records of the first images again (`to_compute_again`); DataError when
    one does not agree.

    threat: at which `demanded` counts images.
    """
    hits = [int(claim.holds_at(threat)) for claim in claims]
    chosen = to_compute_again(hits, demanded, usual(len(claims)))
    step = certifier.at_once or batch_size
    for start in range(0, len(chosen), step):
        places = chosen[start : start + step]
        part = [claims[place] for place in places]
        for claim, confirmation in zip(
            part, certifier.repeat(part, images.fetch(places)), strict=True
        ):
            if confirmation.status != "verified":
                raise DataError(
                    f"the record of image {claim.index} in {where} does not agree: {confirmation.why}",
                    HINT,
                )
    return Resumed(len(claims), len(chosen))
