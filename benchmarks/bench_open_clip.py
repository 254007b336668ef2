"""Claim: a training step takes more items a second than open_clip's, on the CPU, in fp32 and in bf16.

The same pictures and captions of the stamps, forward, SigLIP loss, backward, clipping and AdamW, in turns:
  Treadle         one tower over packed bytes and patches, pictures at their own sizes, `Trainer.step`
  open_clip       its CLIP model of a picture tower and a text tower of the same width and depth, `SigLipLoss`; pictures 192 x 192 at the same
                  patch side (65 tokens, what Treadle's have on average), captions padded to its 77 tokens
  open_clip, 32   the same, captions cut to 32 tokens, which few of these reach

Decoding, resizing and tokenizing are left out of the time, and so are the weights: both start at random. open_clip is no dependency of
Treadle: install it (`pip install open_clip_torch`), into a folder of its own if you like, and name that on PYTHONPATH.

    PYTHONPATH=benchmarks:FOLDER python benchmarks/bench_open_clip.py --shards shards
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from treadle import BatchShape, Edges, ImageShape, Modality, Objective, Packer, Relations, Schedule, StepItems, Trainer, TrainerConfig
from treadle.decoders import decode
from treadle.model.device import keep_freed_memory
from treadle.pipeline.shards import Shard

PATCH, SIDE = 24, 192


def stamps(shards: list[str], count: int) -> list[tuple[bytes, bytes]]:
    """Pictures and their English captions."""
    pairs: list[tuple[bytes, bytes]] = []
    for shard in shards:
        for sample in Shard(shard).samples():
            fields = {field.name: bytes(field.data) for field in sample.fields}
            if "png" in fields and "en.txt" in fields:
                pairs.append((fields["png"], fields["en.txt"]))
            if len(pairs) == count:
                return pairs
    raise SystemExit(f"the shards hold {len(pairs)} pictures with captions, not {count}")


def treadle_step(pairs: list[tuple[bytes, bytes]], config: TrainerConfig) -> tuple[Trainer, Callable[[], None], int]:
    """A trainer, a step of it, and the positions of one."""
    count = 2 * len(pairs)
    partner = np.arange(count) ^ 1
    items = StepItems(
        [Modality.IMAGE, Modality.TEXT] * len(pairs),
        [content for pair in pairs for content in pair],
        bags=[i // 2 for i in range(count)],
        groups=[1 + i // 2 for i in range(count)],
        relations=Relations(attract=Edges(np.arange(count + 1), partner)),
    )
    batch = Packer(config.batch).pack(items)
    if batch.segments < count:
        raise SystemExit(f"{count - batch.segments} of {count} items did not fit the batch")
    trainer = Trainer(config)

    def run() -> None:
        _ = trainer.step(batch).stats

    return trainer, run, int(batch.length[: batch.segments].sum())


def open_clip_step(
    open_clip: Any, pairs: list[tuple[bytes, bytes]], config: TrainerConfig, context: int, *, bf16: bool
) -> Callable[[], None]:
    """A step of open_clip's model on the same pictures and captions."""
    torch.manual_seed(0)
    shape = BatchShape(
        max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=4096, image=ImageShape(patch_side=PATCH, channels=3)
    )
    pictures = []
    for picture, _ in pairs:
        pixels = torch.from_numpy(np.array(decode(Modality.IMAGE, picture, shape).array)).permute(2, 0, 1)[None].float() / 127.5 - 1
        pictures.append(torch.nn.functional.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True))
    image = torch.cat(pictures)
    tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=context)
    text = tokenizer([caption.decode("utf-8", "replace") for _, caption in pairs])
    heads = config.hidden // 64
    model = open_clip.model.CLIP(
        embed_dim=config.hidden,
        vision_cfg={"layers": config.depth, "width": config.hidden, "head_width": 64, "patch_size": PATCH, "image_size": SIDE},
        text_cfg={
            "layers": config.depth,
            "width": config.hidden,
            "heads": heads,
            "context_length": context,
            "vocab_size": tokenizer.vocab_size,
        },
        init_logit_scale=float(np.log(10)),
        init_logit_bias=-10.0,
    )
    loss_of = open_clip.loss.SigLipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            image_features, text_features, scale, bias = model(image, text)
            loss = loss_of(image_features, text_features, scale, bias)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--pairs", type=int, default=16, help="pictures with captions [16]")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--full", action="store_true", help="64 pairs and 12 blocks")
    arguments = parser.parse_args()
    try:
        import open_clip
    except ImportError:
        print("open_clip is not installed: nothing compared (pip install open_clip_torch)")
        return
    torch.set_num_threads(1)
    keep_freed_memory()
    count, depth = (64, 12) if arguments.full else (arguments.pairs, arguments.depth)
    pairs = stamps([str(path) for path in sorted(arguments.shards.glob("train-*.tar"))], count)
    for name in arguments.dtypes:
        precision = "bf16" if name == "bfloat16" else "fp32"
        shape = BatchShape(
            max_rows_per_device=4 * count, max_segments_per_device=2 * count, max_columns_per_row=160, image=ImageShape(patch_side=PATCH)
        )
        config = TrainerConfig(
            depth=depth, hidden=arguments.hidden, batch=shape, schedule=Schedule(steps=1000), objective=Objective.CONTRASTIVE, device="cpu",
            precision=precision,  # type: ignore[arg-type]  # one of the two
        )  # fmt: skip
        trainer, ours, positions = treadle_step(pairs, config)
        cases: dict[str, Callable[[], None]] = {"Treadle": ours}
        for label, context in (("open_clip", 77), ("open_clip, 32", 32)):
            cases[label] = open_clip_step(open_clip, pairs, config, context, bf16=precision == "bf16")
        described = {"pairs": count, "hidden": arguments.hidden, "depth": depth, "positions": positions, "threads": 1}
        rates: dict[str, list[float]] = {label: [] for label in cases}
        for turn in range(arguments.repetitions + 1):
            for label, run in cases.items():
                start = time.perf_counter()
                run()
                if turn:
                    rates[label].append(2 * count / (time.perf_counter() - start))
        trainer.close()
        for label, values in rates.items():
            record.append(
                record.Row(op="training step", impl=label, shape=described, dtype=name, metric="items", unit="1/s", values=values)
            )
        for label in rates:
            if label != "Treadle":
                values = record.ratios(rates["Treadle"], rates[label])
                record.append(
                    record.Row(
                        op="training step",
                        impl="Treadle",
                        baseline=label,
                        shape=described,
                        dtype=name,
                        metric="rate ratio",
                        unit="x",
                        values=values,
                    )
                )


if __name__ == "__main__":
    main()
