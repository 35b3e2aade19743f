r"""CPU seconds of local certificates, beside those of another commit, as ratios of one run.

    python -m benchmarks.local [--beside COMMIT] [--rounds 3]

Each row runs in a process of its own with this tree and with that of COMMIT, one after the other, --rounds times; the
table shows the least CPU seconds of both, start-up apart, and their ratio. `walks`: eight digits images of
certvit/digits-vit at l2 .1, in one walk where a tree has such; `width 64`: one of a ViT of 17 tokens, width 64, depth 2,
random weights, at .005; `around`: ten ways back at one digits image; `cuts`: --effort branch at two digits images that
one walk does not prove at .5. What COMMIT cannot run or prove is -.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = """
import time, torch, certvit
torch.set_num_threads(1)
torch.manual_seed(0)
images, _ = certvit.images("certvit/digits-vit", "digits", limit=100).tensors()
images = images.double()
def certifier(model, *options, **named):
    from certcli.certify.local import LocalCertifier
    try:
        from certcli.certify.options import Local
    except ImportError:  # an older tree
        from certcli.certify.local_options import Local
    return LocalCertifier(model, (1, 8, 8), Local(*options, **named))
def walks(model, pixels, radius, *options, **named):
    run = certifier(model, *options, at=(radius,), **named)
    tops = model(pixels).argmax(1)
    labels = tops.tolist()
    run.proven(pixels[:1], labels[0], radius)
    def together():
        walked = run.together(pixels, tops)
        return [run.radius(pixels[i : i + 1], j, walked[i]) for i, j in enumerate(labels)]
    if hasattr(run, "together"):
        return together
    return lambda: [run.proven(pixels[i : i + 1], j, radius) for i, j in enumerate(labels)]
def around(model, pixels):
    from certcli.certify.around import Around, AroundImages
    run = AroundImages(model, (1, 8, 8))
    return lambda: [run.near(pixels, Around(0.1, slopes=False))]
def plain():
    from timm.models.vision_transformer import VisionTransformer
    from certcli.checkpoint.record import InputSpec
    from certcli.models.pixels import PixelModel
    shape = dict(img_size=8, patch_size=2, in_chans=1, num_classes=10)
    net = VisionTransformer(**shape, embed_dim=64, depth=2, num_heads=4, mlp_ratio=2)
    spec = InputSpec(size=(1, 8, 8), mean=(0.5,), std=(0.5,))
    return PixelModel(spec, net).double().eval().requires_grad_(False)
digits = certvit.network("certvit/digits-vit").double()
"""
ROWS = {
    "walks": 'walks(digits, images[:8], 0.1, "zonotope")',
    "width 64": 'walks(plain(), images[:1], 0.005, "zonotope")',
    "around": "around(digits, images[:1])",
    "cuts": 'walks(digits, images[[63, 64]], 0.5, "branch", seconds=60.0)',
}
END = """
started = time.process_time()
proven = run()
print("seconds", time.process_time() - started)
raise SystemExit(not all(proven))
"""


def seconds(row: str, tree: Path) -> float:
    """Return the CPU seconds of a row with the package of a tree; inf where it proves nothing."""
    code = f"{START}run = {ROWS[row]}{END}"
    variables = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, cwd=tree, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return float(lines[-1].split()[1]) if not done.returncode else float("inf")


def table(rows: list[str], other: Path | None, rounds: int) -> None:
    """Print the least seconds of each row with both trees, and their ratio."""
    print("| row | here, s | there, s | ratio |\n|---|---|---|---|")
    trees = [ROOT] if other is None else [ROOT, other]
    for row in rows:
        times = [[seconds(row, tree) for tree in trees] for _ in range(rounds)]
        here, *there = map(min, zip(*times, strict=True))
        of_other = [f"{least:.2f} | {here / least:.2f}" for least in there if 0 < least < 1e9]
        print(f"| {row} | {here:.2f} | {(of_other or ['- | -'])[0]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    if options.beside is None:
        table(options.rows, None, options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["git", "archive", options.beside, "certcli", "certvit"],
            cwd=ROOT, capture_output=True, check=True,
        )  # fmt: skip
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        table(options.rows, Path(folder), options.rounds)


if __name__ == "__main__":
    main()
