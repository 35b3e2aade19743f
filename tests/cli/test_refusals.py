"""What a command refuses: a row names the words, the exit code, and a part of cause or hint."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.commands import console

ROWS = """
lipschitz m --frobnicate | 2 | --frobnicate
certfy | 2 | 'certify'
certify | 2 | CKPT
lipschitz m --max large | 2 | --max
lipschitz m --max nan | 2 | --max
lipschitz m --max -1 | 2 | --max
constrain m --beta nan | 2 | --beta nan
certify m --vnnlib q.vnnlib | 2 | an ONNX file
certify m --result r.txt | 2 | answer to a query
certify n.onnx --vnnlib q.vnnlib -e 0.1 | 2 | -e does not go with --vnnlib
certify n.onnx --vnnlib q.vnnlib --method smoothing | 2 | --method does not go with --vnnlib
certify n.onnx --vnnlib q.vnnlib --records r.jsonl | 2 | --records does not go with --vnnlib
constrain n.onnx | 2 | n.onnx is a program
finetune n.onnx --loss ce | 2 | n.onnx is a program
adapt n.onnx | 2 | n.onnx is a program
lipschitz n.onnx -o x.safetensors | 2 | n.onnx is a program
attack n.onnx -o x.safetensors | 2 | n.onnx is a program
certify m -e nan | 2 | nan
certify m -e inf | 2 | inf
certify m -e -1 | 2 | -1
certify m --min-certified nan | 2 | nan
certify m --min-certified 90 | 2 | 90
certify m --min-certified 0.5@nan | 2 | nan
certify m --min-certified 0.5@inf | 2 | inf
certify m --min-certified half | 2 | half
certify m --method nobody | 2 | nobody
certify m --patch 2 | 2 | --patch is for
certify m --method patch | 2 | needs a patch
certify m --method patch --patch 9 | 2 | do not fit
certify m --method patch --patch soup | 2 | is no patch
certify m --method patch --patch 8 | 2 | hide the whole image
certify m --method patch --patch 2 --masks 1 | 2 | --masks 1
certify m --method patch --patch 2 -e 0.5 | 2 | --epsilon does not go
certify m --method patch --patch 2 --method lipschitz | 2 | stands alone
certify m --method patch --patch 2 --procedure prayer | 2 | unknown procedure
certify m --method patch --patch 2 --procedure voting --band-width 9 | 2 | bands of 9 columns
certify m --method patch --patch 2 --hide faces | 2 | unknown hide 'faces'
certify m --method patch --patch 2 --min-certified 0.5@3 | 2 | names a patch that is not certified
certify m --method lipschitz --denoiser m | 2 | works with --method smoothing
certify m --method smoothing --sigma 0 | 2 | sigma
certify m --method smoothing --sigma -0.1 | 2 | sigma
certify m --method smoothing --sigma nan | 2 | sigma
certify m --method smoothing --sigma wide | 2 | sigma
certify m --method smoothing --sigma 0.25,0.5 | 2 | radii of several would share --alpha
certify m --method smoothing --alpha 0 | 2 | alpha
certify m --method smoothing --alpha 1 | 2 | alpha
certify m --method smoothing --alpha nan | 2 | alpha
certify m --method smoothing --samples 0 | 2 | samples
certify m --method smoothing --samples 9 | 2 | --samples 10 or more
certify m --method smoothing --samples 100 -e 9 | 2 | no radius beyond 0.375
certify m --method smoothing --enough nan | 2 | enough
certify m --method smoothing --enough 5 | 2 | enough
certify m --method smoothing --precision int3 | 2 | int3
certify m --method smoothing --seed -1 | 2 | seed
certify m --method smoothing --method auto | 2 | auto alone
certify m --method smoothing --norm linf | 2 | --method local only
certify m --method smoothing --method local --norm linf | 2 | --method local only
certify m --method smoothing --method smoothing | 2 | once
certify m --method smoothing --method lipschitz --records r.jsonl | 2 | holds one method
certify m --sigma 0.25 --sigma 0.5 | 2 | --sigma is given 2 times
audit m --sigma 0.25 --sigma 0.5 | 2 | --sigma is given 2 times
verify m m --records x.jsonl | 2 | --records
verify m m --plot x.png | 2 | --plot
verify m m -o x.safetensors | 2 | -o
verify m m --min-certified 0.5 | 2 | --min-certified
constrain m --keep 0 | 2 | --keep must lie between
constrain m --keep 1.5 | 2 | --keep must lie between
certify m --method smoothing --effort branch | 2 | works with --method local
certify m --method local --radius wide | 2 | unknown radius
certify m --method local --sigma 0.2 | 2 | works with --method smoothing
certify m --method box --method bcp --samples 7 | 2 | works with --method smoothing
attack m -e 1/0 | 2 | 1/0
attack m -e -0.1 | 2 | -0.1
attack m -e nan | 2 | nan
attack m --min-robust nan | 2 | nan
attack m --min-robust 90 | 2 | 90
attack m --min-robust -0.5 | 2 | -0.5
attack m --preset nobody | 2 | nobody
attack m --preset certvit -a pgd | 2 | certvit
attack m --preset certvit --norm l2 | 2 | certvit
attack m --preset certvit --steps 3 | 2 | certvit
attack m --preset cauchy -e 1.0 | 2 | cauchy
attack m -a pgd -a pgd | 2 | twice
attack m --norm l1 | 2 | l1
attack m --step-size 0 | 2 | step_size
attack m -a cw --norm linf | 2 | cw
attack m --resume | 2 | --records
attack m --resume --records r.jsonl --save-examples x.safetensors | 2 | --resume
attack m --compare other.safetensors | 2 | gallery
attack m -a pdg | 2 | did you mean 'pgd'
predict m i --defence prayer | 2 | prayer
predict m i --prove | 2 | --defence patch
predict m i --patch 2 | 2 | --defence patch
predict m i --defence patch | 2 | needs a patch
predict m i --defence patch --patch 99 | 2 | do not fit
predict m nowhere.png | 6 | nowhere.png
finetune m --batch-size 99999999999999999999 | 2 | --batch-size
finetune m -e nan | 2 | nan
finetune m --schedule cosin | 2 | cosin
finetune m --enclosure-penalty 0.3,0 | 2 | neither one number nor three
"""
TABLE = [tuple(part.strip() for part in row.split(" | ")) for row in ROWS.strip().splitlines()]


@pytest.mark.parametrize(("words", "code", "named"), TABLE, ids=[words for words, *_ in TABLE])
def test_what_is_refused_is_one_line_and_with_json_one_document(
    words: str,
    code: str,
    named: str,
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"m": workshop / "plain.safetensors", "i": tmp_path / "i.png"}
    Image.new("L", (8, 8)).save(files["i"])
    Path("n.onnx").touch()
    typed = [files.get(word, word) for word in words.split()]
    ended, out, err = console(*typed)
    assert ended == int(code)
    # of a network that was read already
    assert [line for line in out.splitlines() if not line.startswith("network: ")] == []
    assert err.count("certvit:") == 1
    assert named in err.partition("certvit:")[2]
    ended, out, _ = console(*typed, "--json")
    (line,) = out.splitlines()
    error = json.loads(line)
    assert (ended, error["code"]) == (int(code), int(code))
    assert named in error["error"] + error["hint"]
    assert error["hint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i.png", "n.onnx"]
