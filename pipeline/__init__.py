"""Bytes in storage to packed batches: shard streams, the packer, and what they are made of."""

from typing import TYPE_CHECKING

from treadle.lazy import lazy_exports

if TYPE_CHECKING:
    from treadle.pipeline.batch import PackedBatch
    from treadle.pipeline.feed import NoSamplesError
    from treadle.pipeline.items import Edges, Relations, StepItems
    from treadle.pipeline.packed import PackedReader, PackedWriter
    from treadle.pipeline.packer import Packer
    from treadle.pipeline.samples import Schema
    from treadle.pipeline.sources import Source
    from treadle.pipeline.state import StreamState
    from treadle.pipeline.storage import RetryPolicy
    from treadle.pipeline.stream import ShardStream
    from treadle.pipeline.torch_stream import TorchStream
    from treadle.pipeline.webdataset import from_webdataset
    from treadle.shape import (
        AudioShape,
        BatchShape,
        ImageShape,
        LateInteractionSide,
        Modality,
        Negatives,
        Objective,
        PairLossForm,
        VideoShape,
    )

__all__ = [
    "AudioShape",
    "BatchShape",
    "Edges",
    "ImageShape",
    "LateInteractionSide",
    "Modality",
    "Negatives",
    "NoSamplesError",
    "Objective",
    "PackedBatch",
    "PackedReader",
    "PackedWriter",
    "Packer",
    "PairLossForm",
    "Relations",
    "RetryPolicy",
    "Schema",
    "ShardStream",
    "Source",
    "StepItems",
    "StreamState",
    "TorchStream",
    "VideoShape",
    "from_webdataset",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "treadle.pipeline.batch": ("PackedBatch",),
        "treadle.pipeline.feed": ("NoSamplesError",),
        "treadle.pipeline.items": ("Edges", "Relations", "StepItems"),
        "treadle.pipeline.packed": ("PackedReader", "PackedWriter"),
        "treadle.pipeline.packer": ("Packer",),
        "treadle.pipeline.samples": ("Schema",),
        "treadle.pipeline.sources": ("Source",),
        "treadle.pipeline.state": ("StreamState",),
        "treadle.pipeline.storage": ("RetryPolicy",),
        "treadle.pipeline.stream": ("ShardStream",),
        "treadle.pipeline.torch_stream": ("TorchStream",),
        "treadle.pipeline.webdataset": ("from_webdataset",),
        "treadle.shape": (
            "AudioShape",
            "BatchShape",
            "ImageShape",
            "LateInteractionSide",
            "Modality",
            "Negatives",
            "Objective",
            "PairLossForm",
            "VideoShape",
        ),
    },
)
