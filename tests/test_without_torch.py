"""The data plane runs without torch: proven in a process where importing it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


class RefusesToLoad:
    def create_module(self, spec):
        raise ImportError(f"{spec.name} was imported")

    def exec_module(self, module):
        raise AssertionError("not reached")


class NoTorch:
    # Torch can be found, as where it is installed, and fails when it is imported.

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, RefusesToLoad()) if name.partition(".")[0] == "torch" else None


sys.meta_path.insert(0, NoTorch())

from dflash.config import GateThresholds, TokenizeRun
from dflash.data.tokenize_run import tokenize_dataset
from dflash.data.workspace import Workspace
import dflash.runs, dflash.train.curves, dflash.train.launch, dflash.train.preflight
import dflash.data.adopt, dflash.data.backup, dflash.data.inspect, dflash.data.merge, dflash.data.verify
import flows.cli, flows.generate_completions, flows.merge_dataset, flows.tokenize_completions
import flows.evaluate_drafter, flows.export_drafter, flows.train_drafter, flows.train_online

if __name__ == "__main__":
    source, tokenizer, folder = sys.argv[1:]
    run = TokenizeRun(
        source=source,
        dataset=folder + "/dataset",
        tokenizer=tokenizer,
        files_per_shard=100,
        num_workers=1,
        gate=GateThresholds(max_length_cut_share=1.0),
    )
    manifest = tokenize_dataset(run, None, Workspace(Path(folder) / "work", Path(folder) / "cache"))
    assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
    print(manifest.counts.num_rows)
"""


def test_tokenizing_and_merging_never_import_torch(
    tmp_path: Path, smollm2_tokenizer_dir: Path, example_completions: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    lines = (example_completions / "part-00000.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    (source / "part.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(program), str(source), str(smollm2_tokenizer_dir), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split()[-1] == "20"
