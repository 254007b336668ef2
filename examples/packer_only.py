"""The packer without the rest: a user's own arrays into packed batches, and a small plain-torch model trained on them.

The data are made here: grey squares of some brightness, each with a caption that says so, and short texts alone. A bag is a
square with its caption, or a text. The model is a dozen lines of `torch.nn`; it attends within segments only, by
`batch.document_ids()`, and learns to fill in hidden bytes and to tell how bright a square is.

    python examples/packer_only.py --steps 120
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle import BatchShape, ImageShape, Modality, PackedBatch, Packer
from treadle.pipeline import bag_of_arrays

SHAPE = BatchShape(max_rows_per_device=8, max_segments_per_device=128, max_columns_per_row=128, image=ImageShape(patch_side=8, channels=1))
LEVELS = ("black", "dark", "dim", "bright", "white")
TEXTS = ("to be or not to be", "all that glitters is not gold", "a rose by any other name", "brevity is the soul of wit")
HIDDEN = 64
MASK = 256


def batches(seed: int) -> Iterator[PackedBatch]:
    """Full batches for ever: `add` while not `ready`, then `take`."""
    rng = np.random.default_rng(seed)
    packer = Packer(SHAPE, window=2)
    number = 0
    while True:
        number += 1
        if rng.random() < 0.5:
            level = int(rng.integers(len(LEVELS)))
            side = 8 * int(rng.integers(1, 5))
            square = np.clip(rng.normal(255 * level / (len(LEVELS) - 1), 20, (side, side, 1)), 0, 255).astype(np.uint8)
            caption = np.frombuffer(f"a {LEVELS[level]} square".encode(), np.uint8)
            # Both land in one batch, and share a group: a contrastive loss would not push them apart.
            bag = bag_of_arrays([Modality.IMAGE, Modality.TEXT], [square, caption], SHAPE, groups=[number, number])
        else:
            text = np.frombuffer(TEXTS[rng.integers(len(TEXTS))].encode(), np.uint8)
            bag = bag_of_arrays([Modality.TEXT], [text], SHAPE)
        packer.add_decoded(bag)
        while packer.ready():
            yield packer.take()


class Inputs:
    """A batch as tensors [rows, columns, ...]: bytes, patches, and which segment each position is of."""

    def __init__(self, batch: PackedBatch) -> None:
        side = SHAPE.image.patch_side
        rows, columns = SHAPE.max_rows_per_device, SHAPE.max_columns_per_row
        self.documents = torch.from_numpy(batch.document_ids()).long()
        self.bytes = torch.full((rows, columns), -1)
        self.patches = torch.zeros(rows, columns, side * side)
        self.is_patch = torch.zeros(rows, columns, dtype=torch.bool)
        self.place = torch.zeros(rows, columns, dtype=torch.long)
        brightness = torch.zeros(batch.segments)
        for segment in range(batch.segments):
            row, first = int(batch.row[segment]), int(batch.start[segment]) + 1  # past the prefix position
            content = torch.from_numpy(batch.payload(segment))
            if batch.modality[segment] == Modality.TEXT:
                self.bytes[row, first : first + len(content)] = content.long()
                count = len(content)
            else:
                patches = F.unfold(content[None, None, :, :, 0].float() / 255, side, stride=side)[0].T
                count = len(patches)
                self.patches[row, first : first + count] = patches
                self.is_patch[row, first : first + count] = True
                brightness[segment] = content.float().mean() / 255
            self.place[row, first : first + count] = torch.arange(1, count + 1)
        self.brightness = brightness
        self.pictures = torch.from_numpy(batch.modality[: batch.segments] == Modality.IMAGE)


class Model(nn.Module):
    """One block of attention within segments, one of width."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(257, HIDDEN)
        self.place = nn.Embedding(SHAPE.max_columns_per_row, HIDDEN)
        self.patch = nn.Linear(SHAPE.image.patch_side**2, HIDDEN)
        self.queries_keys_values = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.mix = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.to_byte = nn.Linear(HIDDEN, 256)
        self.to_brightness = nn.Linear(HIDDEN, 1)

    def forward(self, inputs: Inputs, shown: Tensor) -> Tensor:
        """States [rows, columns, hidden] of bytes as `shown`, 256 where one is hidden."""
        states = self.place(inputs.place)
        states = states + self.byte(shown.clamp(min=0)) * (shown >= 0).unsqueeze(-1)
        states = states + self.patch(inputs.patches) * inputs.is_patch.unsqueeze(-1)
        # A position attends to its own segment; empty ones to each other, so that no row of the softmax is empty. For FlexAttention the
        # same is `mask_mod = lambda b, h, q, k: documents[b, q] == documents[b, k]`; kernels of variable length take `batch.cu_seqlens()`.
        allowed = (inputs.documents.unsqueeze(2) == inputs.documents.unsqueeze(1)).unsqueeze(1)
        queries, keys, values = (
            part.unflatten(-1, (2, HIDDEN // 2)).transpose(1, 2) for part in self.queries_keys_values(states).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed)
        states = states + mixed.transpose(1, 2).flatten(2)
        return states + self.mix(states)


def loss_of(model: Model, inputs: Inputs, generator: torch.Generator) -> Tensor:
    """Hidden bytes told from the others of their text, and the mean of each square from its patches."""
    hidden = (torch.rand(inputs.bytes.shape, generator=generator) < 0.15) & (inputs.bytes >= 0)
    states = model(inputs, inputs.bytes.masked_fill(hidden, MASK))
    text = F.cross_entropy(model.to_byte(states[hidden]), inputs.bytes[hidden])
    taken = inputs.documents >= 0
    pooled = torch.zeros(len(inputs.brightness), HIDDEN).index_add(0, inputs.documents[taken], states[taken])
    pooled = pooled / torch.bincount(inputs.documents[taken], minlength=len(pooled)).clamp(min=1).unsqueeze(1)
    told = model.to_brightness(pooled[inputs.pictures]).squeeze(1)
    return text + F.mse_loss(told, inputs.brightness[inputs.pictures])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--picture", help="draws the first batch into this PNG file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, batch in zip(range(1, arguments.steps + 1), batches(seed=0), strict=False):
        if step == 1:
            print(batch)
            if arguments.picture:
                batch.draw(arguments.picture)
        loss = loss_of(model, Inputs(batch), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {100 * batch.fill['positions']:.1f}% of positions used")


if __name__ == "__main__":
    main()
