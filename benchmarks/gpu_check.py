"""One prepared check for a GPU that is lent for minutes: is flex right, how fast is a step, does the preflight hold?

    python benchmarks/gpu_check.py --json out.json          # an 8B-shaped target, about 4 minutes on an H200
    python benchmarks/gpu_check.py --tiny --device cpu      # the same path in seconds, for a test

1. Flex attention against the dense oracle, forward and backward, over packed documents and both layer types.
2. SDPA against flex: a forward and backward pass of the drafter at the training shape.
3. Training steps of a target and a drafter with random weights: tokens/s, model FLOP utilisation, peak memory.
4. The preflight's prediction of that peak.

It needs torch and this package with its dependencies; no network, no weights, no data.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, this folder would come first and its tokenize.py would hide the standard module.
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

import argparse  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.gpu_shapes import (  # noqa: E402
    TINY,
    Scale,
    network_of,
    places,
    random_pack,
    random_target,
    step_flops,
    target_numbers,
)

NEEDED = ("torch", "numpy", "pydantic", "pyarrow", "transformers", "safetensors", "tokenizers", "jinja2")
# Dense bf16 FLOP/s as sold.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
TOLERANCE = 0.05


def main() -> int:
    """Parse the command line, check, print; 1 where a check failed, 2 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing here: {', '.join(missing)}. Bring their wheels along and install them without the network.")
        return 2
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --tiny --device cpu runs the same path without one.")
        return 2
    found = check(TINY if arguments.tiny else Scale(), torch.device(arguments.device))
    for section, values in found.items():
        print(f"\n{section}")
        for name, value in values.items():
            print(f"  {name:>28}  {value:.6g}" if isinstance(value, float) else f"  {name:>28}  {value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(values.get("passed", True) for values in found.values()) else 1


def check(scale: Scale, device: Any) -> dict[str, dict[str, Any]]:
    """Run all sections; each begins with an empty cache."""
    import torch

    from dflash.train.environment import fingerprint

    torch.manual_seed(0)
    return {
        "environment": dict(fingerprint()),
        "equality": _equality(device),
        "attention": _attention(scale, device),
        "training": _training(scale, device),
    }


def _equality(device: Any) -> dict[str, Any]:
    """The fast backend against the dense oracle; flex has no backward pass on a CPU, so SDPA stands in there."""
    import torch

    from dflash.model.attention import BlockLayout
    from dflash.model.drafter import Drafter
    from dflash.model.layout import DrafterConfig

    config = DrafterConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, vocab_size=1000, rope_theta=1e6, max_position_embeddings=4096, block_size=16, mask_token_id=5,
        target_layer_ids=(1, 3), num_target_layers=6, layer_types=("sliding_attention", "full_attention"),
        sliding_window=96,
    )  # fmt: skip
    backend = "flex" if device.type == "cuda" else "sdpa"
    features = torch.randn(700, config.feature_size, device=device)
    embeddings, weights = torch.randn(24, 16, 256, device=device), torch.randn(24, 16, 256, device=device)
    document = torch.arange(3, device=device).repeat_interleave(torch.tensor([300, 150, 250], device=device))
    position = torch.cat([torch.arange(size, device=device) for size in (300, 150, 250)])
    layout = BlockLayout(torch.randperm(699, device=device)[:24].sort().values, position, document)
    results = {}
    for name in ("dense", backend):
        torch.manual_seed(1)
        drafter = Drafter(config, name).to(device)
        given = features.clone().requires_grad_(True)
        out = drafter(given, embeddings, layout)
        # Weighted: the squares of a normed output are constant, and their gradient nothing but rounding.
        (out * weights).sum().backward()
        results[name] = (out.detach(), given.grad, drafter.fc.weight.grad)
    worst = [
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(results[backend], results["dense"], strict=True)
    ]
    names = ("output_difference", "feature_gradient_difference", "weight_gradient_difference")
    # fp32 with TF32 off: what is left is the order of sums.
    return {"backend": backend, **dict(zip(names, worst, strict=True)), "passed": max(worst) < 2e-4}


def _attention(scale: Scale, device: Any) -> dict[str, Any]:
    """Seconds of the drafter's forward and backward pass by backend."""
    import torch

    from dflash.model.attention import BlockLayout
    from dflash.model.drafter import Drafter

    network = network_of(scale)
    layout = BlockLayout(*places(scale, device))
    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    features = torch.randn(scale.pack_tokens, network.feature_size, device=device, dtype=low)
    embeddings = torch.randn(scale.num_anchors, network.block_size, network.hidden_size, device=device, dtype=low)
    found: dict[str, Any] = {}
    for backend in ("sdpa", "flex") if device.type == "cuda" else ("dense", "sdpa"):
        drafter = Drafter(network, backend).to(device)

        def step(drafter: Drafter = drafter) -> None:
            drafter.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                out = drafter(features, embeddings, layout)
            out.float().square().mean().backward()

        found[f"{backend}_s"] = _seconds(step, device, 3)
        del drafter
        _release(device)
    slow, fast = found.values()
    return {**found, "speed_up": slow / fast}


def _training(scale: Scale, device: Any) -> dict[str, Any]:
    """Steps of the real engine, their peak, and what the preflight says."""
    from dflash.model.features import Target
    from dflash.train.config import TrainConfig
    from dflash.train.engine import Engine
    from dflash.train.feature_source import ComputedFeatures
    from dflash.train.memory import plan_memory
    from dflash.train.replay import Features
    from dflash.train.setup import build_drafter
    from dflash.train.world import World

    network = network_of(scale)
    config = TrainConfig(pack_tokens=scale.pack_tokens, num_anchors=scale.num_anchors)
    before = _reserved_outside(device)
    with _peak(device) as peak:
        target = Target(random_target(scale, device), network.target_layer_ids)
        drafter = build_drafter(config, network, target)
        engine = Engine(config, drafter, target, Features(ComputedFeatures(target), config.replay, device), World())
        number = iter(range(1, 1000))

        def step() -> None:
            engine.step([random_pack(scale, next(number))], "fresh", 0.5)

        seconds = _seconds(step, device, scale.steps, warm=2)
    shape = target_numbers(target, device)
    plan = plan_memory(config, network, shape, environment_bytes=0)
    real = peak()
    flops = step_flops(scale, network, shape.num_parameters)
    sold = next((value for name, value in PEAK_FLOPS.items() if name in _device_name(device)), None)
    error = plan.total_bytes / real - 1
    # On a CPU sizes are too small for the constant parts to vanish, so only a GPU is held to the tolerance.
    return {
        "target_parameters": shape.num_parameters,
        "step_s": seconds,
        "tokens_per_s": scale.pack_tokens / seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": None if sold is None else flops / seconds / sold,
        "predicted_gb": plan.total_bytes / 1e9,
        "peak_gb": real / 1e9,
        "prediction_error": error,
        "environment_gb": (_reserved_outside(device) - before) / 1e9,
        "parts_gb": {name: round(size / 1e9, 3) for name, size in plan.parts.items()},
        "passed": device.type != "cuda" or abs(error) <= TOLERANCE,
    }


def _seconds(step: Callable[[], object], device: Any, steps: int, warm: int = 2) -> float:
    for _ in range(warm):
        step()
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize(device)
    return (time.perf_counter() - started) / steps


@contextmanager
def _peak(device: Any) -> Iterator[Callable[[], int]]:
    """Most bytes of tensors inside: by CUDA's counter, or by ours."""
    import torch

    from benchmarks.tensor_peak import TensorPeak

    if device.type == "cuda":
        _release(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    counter = TensorPeak()
    with counter:
        yield lambda: counter.peak_bytes


def _reserved_outside(device: Any) -> int:
    """Bytes in use on the device that aren't tensors: context, workspaces, what the allocator can't use."""
    import torch

    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_allocated(device))


def _release(device: Any) -> None:
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
