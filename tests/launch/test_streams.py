"""What ranks agree on before they open their streams."""

from pathlib import Path

import pytest

from treadle.launch.settings import DataSettings, SourceSettings
from treadle.launch.streams import open_stream, with_listed_sources
from treadle.pipeline.sources import ListedUrls
from treadle.shape import BatchShape


class Sharing:
    """Two ranks, one after the other: the second receives what the first sent."""

    def __init__(self) -> None:
        self.rank = 0
        self.sent = b""

    def share_bytes(self, data: bytes) -> bytes:
        if self.rank == 0:
            self.sent = data
        return self.sent


def test_rank_0_lists_and_the_others_take_its_word(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.tar").write_bytes(bytes(1024))
    data = DataSettings(
        sources=(SourceSettings(urls=(f"{tmp_path}/*.tar",)), SourceSettings(urls=(f"{tmp_path}/{{a,b}}.tar",), weight=3.0))
    )
    world = Sharing()
    first = with_listed_sources(data, world)
    world.rank = 1
    # What has changed meanwhile is not seen.
    (tmp_path / "c.tar").write_bytes(bytes(1024))
    second = with_listed_sources(data, world)
    assert [source.urls for source in first.sources] == [(f"{tmp_path}/a.tar", f"{tmp_path}/b.tar")] * 2
    assert first == second and all(isinstance(source.urls, ListedUrls) for source in second.sources)
    assert [source.weight for source in second.sources] == [1.0, 3.0]
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=2, max_columns_per_row=16)
    with open_stream(second, shape) as stream:
        assert [source.num_shards for source in stream.manifest.sources] == [2, 2]


def test_one_plain_source_stays_unblended(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(bytes(1024))
    data = DataSettings(sources=(SourceSettings(urls=(f"{tmp_path}/a.tar",)),))
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=2, max_columns_per_row=16)
    with open_stream(data, shape) as plain, open_stream(with_listed_sources(data, Sharing()), shape) as listed:
        assert plain.manifest == listed.manifest


def test_what_rank_0_cannot_list_is_refused_on_all(tmp_path: Path) -> None:
    data = DataSettings(sources=(SourceSettings(urls=(f"{tmp_path}/*.tar",)),))
    world = Sharing()
    for rank in range(2):
        world.rank = rank
        with pytest.raises(ValueError, match="matches nothing"):
            with_listed_sources(data, world)
