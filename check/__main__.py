"""`python -m check CKPT PROOF`: exit code 0 agree, 1 refute, 2 cannot check something, 3 unreadable
(docs/check.md).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from check.documents import Unreadable, read_checkpoint, read_images, read_json, read_records
from check.networks import rebuild
from check.norms import Unknown
from check.verdicts import AGREE, OPEN, REFUTE, Verdict, find_images, judge_proof, judge_radii


def verdicts(options: argparse.Namespace) -> Iterator[Verdict]:
    """Yield what becomes of the proof, and of the records where they are given."""
    document = read_json(options.proof.read_bytes(), options.proof)
    tensors, function, digest = read_checkpoint(options.checkpoint, document)
    header, rows = (
        read_records(options.records) if options.records else ({"checkpoint": digest}, [])
    )
    images = find_images(
        rows, read_images(options.images, function["size"]) if options.images else []
    )
    expected = {
        "checkpoint": digest,
        "function": function,
        "arch": function["arch"],
        "input": function["size"],
    }
    if header.get("checkpoint") != digest or any(
        document.get(name, function) != expected[name] for name in expected
    ):
        yield Verdict(
            "checkpoint",
            REFUTE,
            f"the proof or the records are about another network than {digest[:16]}",
        )
    try:
        yield from judge_proof(document, rebuild(tensors, function).settled().node)
        promise = (header.get("norm"), dict(header.get("parameters", ())).get("arithmetic", "real"))
        fits = [
            promise in (("l2", "real"), ("l2", "float64")) and row["method"] == "lipschitz"
            for row in rows
        ]
        matched = [image if fit else None for image, fit in zip(images, fits)]
        for row in (row for row, image in zip(rows, matched) if image is None):
            yield Verdict(
                f"image {row['index']}",
                OPEN,
                "another method or arithmetic, or no image of its own",
            )
        if chosen := [row for row, image in zip(rows, matched) if image is not None]:
            batch = np.stack([image for image in matched if image is not None])
            yield from judge_radii(rebuild(tensors, function, batch), chosen)
    except Unknown as reason:
        yield Verdict("network", OPEN, str(reason))
    except (
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as failure:
        yield Verdict(
            "network", OPEN, f"not a network of numbers ({type(failure).__name__}: {failure})"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m check", description="Checks a proof again, without certvit's code."
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a .safetensors file, or a folder with model.safetensors"
    )
    parser.add_argument("proof", type=Path, help="what `certvit lipschitz --json` wrote")
    parser.add_argument(
        "--records",
        type=Path,
        help="certificates of `certvit certify --method lipschitz --records`",
    )
    parser.add_argument(
        "--images", type=Path, help="their images: .npz with `images`, or MNIST's format"
    )
    counts: Counter[str] = Counter()
    try:
        for verdict in verdicts(parser.parse_args(arguments)):
            counts[verdict.status] += 1
            print(
                f"{verdict.status:12}",
                f"{verdict.where}: {verdict.why}".encode("unicode_escape").decode(),
            )
    except SystemExit as stop:
        return 3 if stop.code else 0
    except (Unreadable, OSError) as failure:
        print(f"unreadable: {str(failure)!a:.400}", file=sys.stderr)
        return 3
    print(", ".join(f"{counts[status]} {status}" for status in (AGREE, REFUTE, OPEN)))
    return 1 if counts[REFUTE] else 2 if counts[OPEN] or not counts[AGREE] else 0


if __name__ == "__main__":
    sys.exit(main())
