"""The direct way of texts (`feed.py`, `text_path.py`): the same batches and states, byte for byte, as when every sample goes the long
way through schema, queue and decoder; and the ids that both give.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.pipeline import feed
from treadle.pipeline.identity import all_mixed, as_group, identities, item_ids, mixed, sample_id, sample_seed
from treadle.pipeline.samples import Schema
from treadle.pipeline.sources import Source
from treadle.pipeline.stream import ShardStream
from treadle.pipeline.text_path import TextPath


def write(tars: Any, folder: Path, seed: int) -> list[str]:
    """Texts of one file and of several, some empty or too long for a row, now and then a picture or relations."""
    rng = random.Random(seed)
    folder.mkdir()
    for shard in range(4):
        samples: list[tuple[str, dict[str, bytes]]] = []
        for index in range(rng.choice([0, 20, 45])):
            fields = {"txt": rng.randbytes(rng.choice([0, 3, 20, 47, 48, 60]))}
            if rng.random() < 0.3:
                fields["en.txt"] = "ä".encode() * rng.randint(1, 40)
            if seed % 2 and rng.random() < 0.05:
                fields["png"] = tars.png(rng, 9, 9)
            if rng.random() < 0.05:
                fields["relations.json"] = b'{"attract": []}'
            samples.append((f"{shard}/{index}", fields))
        tars.write_shard(folder / f"{shard}.tar", samples)
    return [str(path) for path in sorted(folder.glob("*.tar"))]


@pytest.mark.parametrize("seed", range(6))
def test_it_gives_what_the_long_way_gives(tars: Any, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = write(tars, tmp_path / "a", seed)
    sources: Any = urls if seed < 4 else [Source(urls[:2], weight=2.0), Source(urls[2:], repeat=True)]
    options: dict[str, Any] = {
        "lanes": [1, 5, 16][seed % 3],
        "shuffle": [0, 40][seed % 2],
        "epochs": 2,
        "window": 2,
        "seed": seed,
        "threads": 1,
    }
    options["schema"] = Schema(sides={"txt": "query"}) if seed % 2 else Schema()
    # Back to the direct way soon after a picture.
    monkeypatch.setattr(feed, "DIRECT_AFTER_SAMPLES", 5)
    with ShardStream(sources, tars.shape, **options) as stream:
        direct = tars.run(stream)
        counts = stream.quarantine.counts, stream.left_out, stream.stats()["read"]["samples"]
    monkeypatch.setattr(TextPath, "bag", lambda *_: None)
    with ShardStream(sources, tars.shape, **options) as stream:
        assert tars.run(stream) == direct
        assert (stream.quarantine.counts, stream.left_out, stream.stats()["read"]["samples"]) == counts
    assert counts[0]["empty"] > 0


def test_a_picture_in_the_midst_of_many_texts_is_no_hurdle(tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts drawn together with it, and after it, are packed in their turn; a state taken anywhere in between goes on alike."""
    rng = random.Random(5)
    for shard in range(8):
        samples: list[tuple[str, dict[str, bytes]]] = [
            (f"{shard}/{index}", {"txt": rng.randbytes(rng.choice([3, 20, 47]))}) for index in range(150)
        ]
        samples[rng.randrange(60, 120)] = (f"{shard}/p", {"png": tars.png(rng, 9, 9)})
        tars.write_shard(tmp_path / f"{shard}.tar", samples)
    urls = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    monkeypatch.setattr(feed, "DIRECT_AFTER_SAMPLES", 5)
    options: dict[str, Any] = {"lanes": 4, "shuffle": 12, "epochs": 1, "window": 1, "threads": 1}
    with ShardStream(urls, tars.shape, **options) as stream:
        found = [(batch, batch.state.to_bytes()) for batch in stream if batch.state is not None]
    assert sum(batch.bags for batch, _ in found) == 8 * 150
    for number in range(0, len(found), max(1, len(found) // 6)):
        with ShardStream(urls, tars.shape, **options) as stream:
            stream.load_state(found[number][1])
            after = next(stream, None)
            assert after == (found[number + 1][0] if number + 1 < len(found) else None)
    monkeypatch.setattr(TextPath, "bag", lambda *_: None)
    monkeypatch.setattr(TextPath, "run", lambda *_: None)
    with ShardStream(urls, tars.shape, **options) as stream:
        assert [(batch, batch.state.to_bytes()) for batch in stream if batch.state is not None] == found


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("shuffle", [0, 40])
def test_a_state_is_of_its_batch_however_late_it_is_looked_at(tars: Any, tmp_path: Path, blended: bool, shuffle: int) -> None:
    """Attaching a state takes down references alone; what they refer to must not have gone on."""
    urls = write(tars, tmp_path / "a", 2)
    sources: Any = [Source(urls[:2], weight=2.0), Source(urls[2:])] if blended else urls
    options: dict[str, Any] = {"lanes": 5, "shuffle": shuffle, "epochs": 3, "window": 2, "threads": 1}
    with ShardStream(sources, tars.shape, **options) as stream:
        at_once = [batch.state.to_bytes() for batch in stream if batch.state is not None]
    with ShardStream(sources, tars.shape, **options) as stream:
        states = [batch.state for batch in stream]
    assert len(states) > 8
    assert [state.to_bytes() for state in states if state is not None] == at_once


def test_ids_of_many_are_those_of_each() -> None:
    seeds = [sample_seed("a.tar", index) for index in range(50)] + [0, 2**64 - 1]
    counts = [1 + index % 4 for index in range(52)]
    groups, ids = identities(seeds, counts)
    assert groups.tolist() == [as_group(mixed(seed)) for seed, count in zip(seeds, counts, strict=True) for _ in range(count)]
    assert ids.tolist() == [each for seed, count in zip(seeds, counts, strict=True) for each in item_ids(mixed(seed), count)]
    assert len(set(ids.tolist())) == len(ids)
    alone = identities(seeds, [1] * 52)
    assert alone[1].tolist() == [item_ids(mixed(seed), 1)[0] for seed in seeds]
    assert sample_id("a.tar", 3) == mixed(seeds[3]) != sample_id("b.tar", 3)
    # Zero would be no group: the one value that is mixed to it gets another.
    assert mixed(0) == 0 == int(all_mixed(np.zeros(1, np.uint64))[0])
    assert as_group(0) == 1 == int(identities([0], [1])[0][0])


def test_the_mixer_is_the_published_one() -> None:
    # SplitMix64 from state 1234567: its first outputs, as the author's test vectors have them.
    state, found = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        found.append(mixed(state))
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_credentials_are_no_part_of_an_id() -> None:
    assert sample_id("https://user:secret@host/a.tar", 1) == sample_id("https://host/a.tar", 1)
