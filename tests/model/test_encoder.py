"""The encoder: vectors in input order whatever they are packed with, token vectors, choices, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treadle.decoders import DecodeError
from treadle.model.config import Choices, LateInteraction, Schedule, TrainerConfig
from treadle.model.encoder import Encoder
from treadle.model.storage_errors import TruncatedFileError
from treadle.model.trainer import Trainer
from treadle.pipeline import Packer, StepItems
from treadle.shape import Modality, Objective

Tiny = Callable[..., TrainerConfig]
Pairs = Callable[[list[int]], StepItems]

JOINT = {"objective": Objective.JOINT, "late_interaction": LateInteraction(weight=0.3, width=16), "choices": Choices(weight=0.5)}


@pytest.fixture
def checkpoint(tmp_path: Path, tiny: Tiny, pairs: Pairs) -> Path:
    path = tmp_path / "c.safetensors"
    with Trainer(tiny(**JOINT)) as trainer:
        for first in range(4):
            trainer.step(pairs([first, first + 1]))
        trainer.save(path)
    return path


def test_vectors_are_those_the_trainer_scores(tmp_path: Path, tiny: Tiny, pairs: Pairs) -> None:
    # A contrastive run corrupts nothing, so that its pooled vectors are the encoder's.
    path = tmp_path / "c.safetensors"
    items = pairs([0, 1, 2])
    with Trainer(tiny(objective=Objective.CONTRASTIVE)) as trainer:
        trainer.step(items)
        trainer.save(path)
        scored = trainer.step(items, embeddings=torch.float32).embeddings
    encoder = Encoder.load(path, "cpu")
    assert scored is not None
    texts = encoder.encode(Modality.TEXT, [bytes(items.content(i)) for i in (0, 2, 4)])
    pictures = encoder.encode("image", [bytes(items.content(i)) for i in (1, 3, 5)])
    torch.testing.assert_close(texts, scored[0::2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pictures, scored[1::2], rtol=1e-4, atol=1e-5)


def test_any_number_in_input_order(checkpoint: Path) -> None:
    encoder = Encoder.load(checkpoint, "cpu")
    # 4 rows of 64 positions hold about 12 of these; 100 need many batches, and lengths differ so that the packer reorders them.
    texts = [f"{'long ' * (i * 7 % 11)}text {i}" for i in range(100)]
    together = encoder.encode("text", texts)
    assert together.shape == (100, 128)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(100), rtol=0, atol=1e-5)
    for index in (0, 17, 99):
        torch.testing.assert_close(encoder.encode("text", [texts[index]])[0], together[index], rtol=1e-4, atol=1e-5)
    data = np.frombuffer("".join(texts[:3]).encode(), np.uint8)
    offsets = np.cumsum([0] + [len(t) for t in texts[:3]])
    torch.testing.assert_close(encoder.encode("text", (data, offsets)), together[:3], rtol=1e-4, atol=1e-5)
    assert encoder.encode("text", []).shape == (0, 128)


def test_fewer_dimensions_are_the_first_normalised_again(checkpoint: Path) -> None:
    encoder = Encoder.load(checkpoint, "cpu")
    full, short = encoder.encode("text", ["one", "two"]), encoder.encode("text", ["one", "two"], dimensions=32)
    torch.testing.assert_close(short, torch.nn.functional.normalize(full[:, :32], dim=1), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"dimensions is 129: it must lie between 1 and 128"):
        encoder.encode("text", ["one"], dimensions=129)


def test_an_undecodable_content_is_named_or_nan(checkpoint: Path, pairs: Pairs) -> None:
    encoder = Encoder.load(checkpoint, "cpu")
    picture = bytes(pairs([1]).content(1))
    with pytest.raises(DecodeError, match="content 1") as caught:
        encoder.encode("image", [picture, b"not a picture", picture])
    assert caught.value.index == 1
    rows = encoder.encode("image", [picture, b"not a picture", picture], on_error="nan")
    assert rows.isnan().all(dim=1).tolist() == [False, True, False]
    tokens = encoder.encode_tokens("image", [picture, b"not a picture"], on_error="nan")
    assert [len(t) for t in tokens] == [4, 0]
    with pytest.raises(ValueError, match=r"on_error is 'skip'"):
        encoder.encode("text", ["x"], on_error="skip")  # type: ignore[arg-type]  # what a user may try


def test_token_vectors(checkpoint: Path) -> None:
    encoder = Encoder.load(checkpoint, "cpu")
    assert encoder.token_width == 16
    short, long = encoder.encode_tokens("text", ["abc", "a longer text"])
    assert short.shape == (3, 16) and long.shape == (13, 16)
    torch.testing.assert_close(long.norm(dim=1), torch.ones(13), rtol=0, atol=1e-5)
    [query] = encoder.encode_tokens("text", ["a longer text"], max_tokens=4)
    torch.testing.assert_close(query, long[:4], rtol=1e-4, atol=1e-5)


def test_choices_are_probabilities_in_order(checkpoint: Path) -> None:
    encoder = Encoder.load(checkpoint, "cpu")
    answer = encoder.choose(["state one: ", "x" * 500, "three"], [b"AB", b"ABCDE", b"z"])
    assert answer.offsets.tolist() == [0, 2, 7, 8]
    for a, b in ((0, 2), (2, 7), (7, 8)):
        assert float(answer.data[a:b].sum()) == pytest.approx(1, abs=1e-5)
    assert float(answer.data[7]) == 1.0
    # Legal bytes are a set: their order moves with their probabilities.
    turned = encoder.choose(["state one: "], [b"BA"])
    assert turned.data.tolist() == pytest.approx(answer.data[:2][::-1].tolist(), rel=1e-4)


def test_choices_are_calibrated_to_what_was_trained(tmp_path: Path, tiny: Tiny) -> None:
    texts = [f"{'ab'[i % 2]} question" for i in range(16)]
    targets = [[0.9, 0.1] if i % 2 == 0 else [0.2, 0.8] for i in range(16)]
    items = StepItems([Modality.TEXT] * 16, [t.encode() for t in texts], choices=[b"AB"] * 16, choice_targets=targets)
    config = tiny(objective=Objective.CONTRASTIVE, choices=Choices(weight=1.0), schedule=Schedule(steps=80, learning_rate=3e-3))
    path = tmp_path / "c.safetensors"
    with Trainer(config) as trainer:
        batch = Packer(config.batch).pack(items)
        trainer.fit([batch] * 80)
        trainer.save(path)
    data = Encoder.load(path, "cpu").choose(texts[:2], [b"AB", b"AB"]).data
    assert data.tolist() == pytest.approx([0.9, 0.1, 0.2, 0.8], abs=0.05)


def test_what_it_refuses(checkpoint: Path, tmp_path: Path, tiny: Tiny) -> None:
    encoder = Encoder.load(checkpoint, "cpu")
    assert encoder.modalities == (Modality.TEXT, Modality.IMAGE, Modality.AUDIO)
    with pytest.raises(ValueError, match="video is not encoded here: the run trained text, image, audio"):
        encoder.encode("video", [b"x"])
    with pytest.raises(ValueError, match="contents is one content"):
        encoder.encode("text", "a text")
    with pytest.raises(ValueError, match="2 states and 1 entries"):
        encoder.choose(["a", "b"], [b"AB"])
    with pytest.raises(ValueError, match="distinct bytes, at least one"):
        encoder.choose(["a"], [b"AA"])
    plain = tmp_path / "plain.safetensors"
    with Trainer(tiny(objective=Objective.CONTRASTIVE)) as trainer:
        trainer.save(plain)
    with pytest.raises(ValueError, match="no token head"):
        Encoder.load(plain, "cpu").encode_tokens("text", ["a"])
    with pytest.raises(ValueError, match="no text head"):
        Encoder.load(plain, "cpu").choose(["a"], [b"AB"])
    plain.write_bytes(plain.read_bytes()[:-100])
    with pytest.raises(TruncatedFileError):
        Encoder.load(plain, "cpu")


def test_every_form_of_contents_is_read_and_nothing_else(checkpoint: Path) -> None:
    encoder = Encoder.load(checkpoint, "cpu")
    expected = encoder.encode("text", ["one", "three"])
    array = np.frombuffer(b"three", np.uint8)
    forms: list[Any] = [[b"one", array], [memoryview(b"one"), bytearray(b"three")], (b"onethree", [0, 3, 8]), (b"one", b"three")]
    for contents in forms:
        assert torch.equal(encoder.encode("text", contents), expected)
    assert encoder.encode("text", (b"", [0])).shape == encoder.encode("text", []).shape == (0, 128)
    refused: list[tuple[Any, str]] = [([b"x", 5], "item 1 is int: it must be bytes"), ((b"abc", [0, 9]), "offsets end at 9")]
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            encoder.encode("text", wrong)


def test_bf16_answers_nearly_the_same(checkpoint: Path) -> None:
    full, half = (Encoder.load(checkpoint, "cpu", precision=p).encode("text", ["one text", "another"]) for p in ("fp32", "bf16"))
    assert half.dtype == torch.float32
    assert float((full * half).sum(dim=1).min()) > 0.99
