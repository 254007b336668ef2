"""Bytes in storage to packed batches: shard streams, the packer, and what they are made of."""

from typing import TYPE_CHECKING

from treadle.lazy import lazy_exports

if TYPE_CHECKING:
    from treadle.pipeline.arrays import bag_of_arrays
    from treadle.pipeline.batch import PackedBatch
    from treadle.pipeline.cache import ShardCache
    from treadle.pipeline.items import Edges, Relations, StepItems
    from treadle.pipeline.losses import NoSamplesError
    from treadle.pipeline.packed import PackedWriter
    from treadle.pipeline.packed_reader import PackedReader
    from treadle.pipeline.packer import Packer
    from treadle.pipeline.quarantine import Quarantine, QuarantineFullError
    from treadle.pipeline.retry import RetryPolicy
    from treadle.pipeline.samples import Schema
    from treadle.pipeline.sources import Source
    from treadle.pipeline.state import StreamState
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
    "Quarantine",
    "QuarantineFullError",
    "Relations",
    "RetryPolicy",
    "Schema",
    "ShardCache",
    "ShardStream",
    "Source",
    "StepItems",
    "StreamState",
    "TorchStream",
    "VideoShape",
    "bag_of_arrays",
    "from_webdataset",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "treadle.pipeline.arrays": ("bag_of_arrays",),
        "treadle.pipeline.batch": ("PackedBatch",),
        "treadle.pipeline.cache": ("ShardCache",),
        "treadle.pipeline.losses": ("NoSamplesError",),
        "treadle.pipeline.items": ("Edges", "Relations", "StepItems"),
        "treadle.pipeline.packed": ("PackedWriter",),
        "treadle.pipeline.packed_reader": ("PackedReader",),
        "treadle.pipeline.packer": ("Packer",),
        "treadle.pipeline.quarantine": ("Quarantine", "QuarantineFullError"),
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
