"""One training step of the drafter (forward, cross entropy over the full vocabulary, backward) against speculators.

Both run the same shapes on the CPU in fp32 with one thread, each in its own process, in turn; the CPU seconds of a step
are a median over all turns and the peak memory is what the process grows by during the steps.

    python benchmarks/train_step.py --install     # once: unpacks the speculators library under .dflash/peers
    python benchmarks/train_step.py [--json]

speculators computes its loss on whole blocks and from the target's logits (cross entropy with their argmax; its
default is KL). Both of its attentions that run on a CPU are tried; its fused losses need Triton, so its eager ones are
compared.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, this folder would come first and its tokenize.py would hide the standard module.
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.measure import print_table  # noqa: E402

PEERS = REPOSITORY / ".dflash" / "peers" / "speculators"
PACKAGES = ("speculators==0.9.0", "hs-connectors", "loguru", "openai", "distro")
VARIANTS = ("ours", "ours-dense", "sdpa", "eager", "sdpa/kl")
GAMMA = 4.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: SmolLM2-135M's sizes, S tokens in two documents, N anchors, blocks of B."""

    num_tokens: int
    num_anchors: int
    block_size: int
    num_layers: int


SHAPES = (Shape(256, 32, 8, 1), Shape(512, 32, 16, 3))


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="unpack the peer under .dflash/peers and stop")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of each candidate")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="candidates")
    parser.add_argument("--worker", nargs=2, metavar=("VARIANT", "SHAPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.install:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PEERS)]
        subprocess.run([*pip, *PACKAGES], check=True)
    elif arguments.worker:
        variant, shape = arguments.worker
        print(json.dumps(_work(variant, SHAPES[int(shape)], arguments.steps)))
    else:
        rows = [row for index in range(len(SHAPES)) for row in _compare(index, arguments)]
        print_table(rows, arguments.json)


def _compare(index: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All candidates at one shape, in turn; ratios are to ours."""
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in arguments.variants}
    for _ in range(arguments.turns):
        for variant, results in runs.items():
            command = [sys.executable, __file__, "--steps", str(arguments.steps), "--worker", variant, str(index)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append(json.loads(out.splitlines()[-1]))
    rows = []
    for variant, results in runs.items():
        step_ms = statistics.median(second for result in results for second in result["step_s"]) * 1e3
        peak_mib = statistics.median(result["peak_bytes"] for result in results) / 2**20
        rows.append(
            {**asdict(SHAPES[index]), "variant": variant, "step_ms": round(step_ms), "peak_mib": round(peak_mib)}
        )
    base = rows[0]
    for row in rows:
        row["time_ratio"] = round(row["step_ms"] / base["step_ms"], 2)
        row["memory_ratio"] = round(row["peak_mib"] / base["peak_mib"], 2)
    return rows


def _work(variant: str, shape: Shape, num_steps: int) -> dict[str, Any]:
    """Measure one candidate in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = _own_step(variant, shape) if variant.startswith("ours") else _peer_step(variant, shape)
    loss = step()  # warm: allocations of gradients and kernels
    start_bytes = _reset_peak()
    times = []
    for _ in range(num_steps):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return {"step_s": times, "peak_bytes": _status("VmHWM") - start_bytes, "loss": loss}


def _inputs(shape: Shape) -> dict[str, Any]:
    import torch

    half = shape.num_tokens // 2
    return {
        "features": torch.randn(shape.num_tokens, 5 * 576),
        "final": torch.randn(shape.num_tokens, 576),
        "weight": torch.randn(49152, 576) * 0.05,
        "ids": torch.randint(0, 49152, (shape.num_tokens,)),
        "document": torch.arange(2).repeat_interleave(half),
        "position": torch.arange(half).repeat(2),
    }


def _own_step(variant: str, shape: Shape) -> Callable[[], float]:
    import torch

    from dflash.model.attention import BlockLayout
    from dflash.model.drafter import Drafter, block_embeddings
    from dflash.model.layout import DrafterConfig
    from dflash.train.loss import LossOptions, block_loss, slot_targets

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = DrafterConfig(
        **sizes, head_dim=64, vocab_size=49152, rope_theta=1e5, max_position_embeddings=8192, num_target_layers=30,
        num_hidden_layers=shape.num_layers, layer_types=("full_attention",) * shape.num_layers,
        block_size=shape.block_size, mask_token_id=16, target_layer_ids=(1, 8, 14, 20, 27),
    )  # fmt: skip
    drafter = Drafter(config, "dense" if variant.endswith("dense") else "sdpa")
    given = _inputs(shape)
    options, loss_mask = LossOptions(gamma=GAMMA), torch.ones(shape.num_tokens, dtype=torch.bool)

    def step() -> float:
        drafter.zero_grad(set_to_none=False)
        anchor = torch.randperm(shape.num_tokens - shape.block_size)[: shape.num_anchors].sort().values
        layout = BlockLayout(anchor, given["position"], given["document"])
        hidden = drafter(given["features"], block_embeddings(given["weight"], given["ids"], anchor, config), layout)
        targets = slot_targets(given["ids"], loss_mask, given["document"], anchor, shape.block_size)
        sums = block_loss(hidden, given["weight"], targets, options)
        loss = sums.numerator / float(sums.weight)
        loss.backward()
        return float(loss.detach())

    return step


def _peer_step(variant: str, shape: Shape) -> Callable[[], float]:
    import torch

    sys.path.append(str(PEERS))
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from transformers import Qwen3Config

    attention, *objective = variant.split("/")
    layer_config = Qwen3Config(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=shape.num_layers, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=49152, attn_implementation=attention,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )  # fmt: skip
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layer_config, draft_vocab_size=49152, block_size=shape.block_size,
            aux_hidden_state_layer_ids=[2, 9, 15, 21, 28], mask_token_id=16,
        )
    )  # fmt: skip
    given = {name: tensor[None] for name, tensor in _inputs(shape).items()}
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        module.weight.data = given["weight"][0]
    loss_config = resolve_loss_config("kl_div" if objective else "ce", "eager")

    def step() -> float:
        model.zero_grad(set_to_none=False)
        _, loss, _ = model(
            given["features"], given["ids"], torch.ones(1, shape.num_tokens), given["final"], given["document"],
            given["position"], loss_config=loss_config, gamma=GAMMA, max_anchors=shape.num_anchors,
        )  # fmt: skip
        loss.backward()
        return float(loss.detach())

    return step


def _reset_peak() -> int:
    """Start a new high-water mark of resident memory and return where it starts."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
