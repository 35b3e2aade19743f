"""Write every case: python -m examples.planted FOLDER."""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from examples.planted import CASES


def main(folder: Path) -> None:
    """Write NAME.safetensors (weights, image, adversary) and cases.json, which holds distance and
    careless radius.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {}
    for name, case in CASES.items():
        planted = case.make()
        save_file(
            {**planted.net.state_dict(), "image": planted.image, "adversary": planted.adversary},
            folder / f"{name}.safetensors",
        )
        careless = None if planted.careless == float("inf") else planted.careless
        about[name] = {"mistake": case.mistake, "distance": planted.distance, "careless": careless}
    (folder / "cases.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
