"""What a process holds, and what a step takes, with the weights shared out (`finetune --shard-weights`) and whole.

    torchrun --nproc-per-node 2 benchmarks/shards.py --file /tmp/large.safetensors
    torchrun --nproc-per-node 2 benchmarks/shards.py --file /tmp/large.safetensors --whole

The network is a ViT-L (--arch takes another) with random weights, written to --file where it is not there yet. Images are
random. Memory is this process's own (RssAnon of /proc; the mapped checkpoint is the system's, shared by all and dropped when
memory is short), the most of it looked at every 10 ms: weights, gradients, two numbers of AdamW a weight, activations.
"""

import argparse
import json
import threading
import time
from pathlib import Path

import torch

from certcli.checkpoint.file import Checkpoint
from certcli.cli.shared.inputs import return_large_blocks
from certcli.finetune.loop import Trainer
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.shards import share_out
from certcli.finetune.state import save_state
from certcli.images.labelled import Images
from certcli.models import build
from certcli.system.processes import Team, team


def random_images(count: int, size: tuple[int, int, int]) -> Images:
    pixels = torch.rand(count, *size, generator=torch.Generator().manual_seed(0))
    names = tuple(map(str, range(10)))
    return Images("random", "train", names, torch.arange(count) % 10, torch.arange(count), lambda at: pixels[list(at)])


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


class Most(threading.Thread):
    """The most of `own_bytes` since it was last asked."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        while True:
            self.most = max(self.most, own_bytes())
            time.sleep(0.01)

    def asked(self) -> float:
        most, self.most = self.most, 0
        return round(most / 2**30, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="vit_large_patch16_224")
    parser.add_argument("--file", type=Path, required=True, help="the checkpoint, made where there is none")
    parser.add_argument("--whole", action="store_true", help="each process holds all weights")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--state", type=Path, help="also write the state that --resume needs there")
    options = parser.parse_args()
    measure(options, team())


def measure(options: argparse.Namespace, together: Team) -> None:
    if together.leads and not options.file.exists():
        net = build.create(options.arch, {}, initialise=False)
        build.initialise(options.arch, {}, build.spec_of(net), build.classes_of(net), seed=0).write(options.file)
    together.agree(lambda: "written")
    most, device = Most(), torch.device(options.device)
    start, rows = own_bytes(), {}
    most.start()
    checkpoint = Checkpoint.read(options.file)
    model = build.load(checkpoint, "cpu" if not options.whole else device, writable=options.whole)
    if not options.whole:
        return_large_blocks()
        share_out(model, device, together, options.precision)
    rows["loading"] = most.asked()
    settings = FinetuneSettings(
        loss="ce", optimiser="adamw", batch_size=options.batch_size, precision=options.precision
    )
    trainer = Trainer(model, settings, checkpoint.record.classes, "x", None, together, not options.whole)
    images = random_images(options.batch_size, model.input_size)
    seconds, cpu = [], []
    for _ in range(options.steps):
        clock, worked = time.perf_counter(), time.process_time()
        trainer.model.train()
        trainer._learn(images, torch.arange(options.batch_size), options.steps)
        seconds.append(round(time.perf_counter() - clock, 2))
        cpu.append(round(time.process_time() - worked, 2))
    rows["training"], rows["between steps"] = most.asked(), round(own_bytes() / 2**30, 2)
    if options.state is not None:
        save_state(options.state, trainer.state(), together)
        rows["saving"] = most.asked()
    about = {
        "rank": together.rank,
        "sharded": not options.whole,
        "before": round(start / 2**30, 2),
        "GiB at most": rows,
    }
    for line in together.everyone({**about, "seconds a step": seconds, "CPU seconds": cpu}):
        if together.leads:
            print(json.dumps(line))
    together.finish()


if __name__ == "__main__":
    main()
