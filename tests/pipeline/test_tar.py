"""The strict tar reader: every malformation gets its kind, every valid archive reads as tarfile reads it."""

import io
import tarfile
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.pipeline.tar import Block, Member, MemberReader, TarError
from treadle.pipeline.tar_header import checksum, signed_checksum


class Forward:
    """A forward byte stream that gives at most `most` bytes at a time, and says its size only when asked to."""

    def __init__(self, data: bytes, *, sized: bool = False, seekable: bool = False) -> None:
        self.data = data
        self.position = 0
        self.size = len(data) if sized else None
        self.seekable = seekable
        self.largest_read = 0

    def read(self, n: int) -> bytes:
        self.largest_read = max(self.largest_read, n)
        piece = self.data[self.position : self.position + n]
        self.position += len(piece)
        return piece

    def skip(self, n: int) -> int:
        moved = max(0, min(n, len(self.data) - self.position))
        self.position += moved
        return moved

    def back(self, n: int) -> bool:
        self.position -= n if self.seekable else 0
        return self.seekable


def read(
    data: bytes, *, chunk_bytes: int = 1 << 20, seekable: bool = False, sized: bool = False
) -> tuple[list[tuple[Member, bytes]], TarError | None, MemberReader]:
    """Members with their content, the error that ended them, and the reader."""
    reader = MemberReader(Forward(data, seekable=seekable, sized=sized), chunk_bytes=chunk_bytes)
    found: list[tuple[Member, bytes]] = []
    try:
        for buffer, base, members in reader.blocks():
            found += [(member, buffer[member.offset - base :][: member.size]) for member in members]
    except TarError as error:
        return found, error, reader
    return found, None, reader


def archive(files: list[tuple[str, bytes]], *, form: int = tarfile.USTAR_FORMAT, headers: dict[str, str] | None = None) -> bytes:
    """A tar of files, by tarfile."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, pax_headers=headers) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def header(
    name: str = "a.bin",
    *,
    size: bytes = b"00000000000\0",
    kind: bytes = b"0",
    magic: bytes = b"ustar\x0000",
    sum_of: Callable[[bytes], int] = checksum,
) -> bytes:
    """One header block with a right checksum."""
    block = bytearray(512)
    block[: len(name.encode())] = name.encode()
    block[124 : 124 + len(size)] = size
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    block[148:156] = b"%06o\0 " % sum_of(bytes(block))
    return bytes(block)


def names(found: list[tuple[Member, bytes]]) -> list[str]:
    return [member.name for member, _ in found]


FIVE = archive([(f"{number:04d}.txt", b"text %d" % number) for number in range(5)])


def test_five_members_with_their_offsets() -> None:
    found, error, reader = read(FIVE)
    assert error is None
    # each member takes a header block and one block of content
    assert [(member.name, member.header_offset, member.offset, member.size) for member, _ in found] == [
        (f"{number:04d}.txt", 1024 * number, 1024 * number + 512, 6) for number in range(5)
    ]
    assert [content for _, content in found] == [b"text %d" % number for number in range(5)]
    assert reader.end == 5 * 1024
    assert not reader.counts


@pytest.mark.parametrize("chunk_bytes", [1024, 1536, 4096, 1 << 20])
@pytest.mark.parametrize("seekable", [False, True])
def test_the_size_of_chunks_changes_nothing(chunk_bytes: int, seekable: bool) -> None:
    data = archive([("a.bin", bytes(range(256)) * 40), ("b.txt", b""), ("c" * 150 + ".txt", b"x" * 511)], form=tarfile.GNU_FORMAT)
    assert read(data, chunk_bytes=chunk_bytes, seekable=seekable)[0] == read(data)[0]


def test_bad_checksum() -> None:
    data = bytearray(FIVE)
    data[1024 * 2 + 148] ^= 1
    found, error, _ = read(bytes(data))
    assert names(found) == ["0000.txt", "0001.txt"]
    assert error is not None
    assert (error.kind, error.offset, error.name, error.name_whole) == ("bad_checksum", 2048, "0002.txt", True)


def test_cut_at_a_member() -> None:
    found, error, reader = read(FIVE[:2048])
    assert names(found) == ["0000.txt", "0001.txt"]
    assert error is None
    assert reader.counts["no_end_marker"] == 1


def test_cut_in_a_header() -> None:
    found, error, _ = read(FIVE[:2148])
    assert names(found) == ["0000.txt", "0001.txt"]
    assert error is not None
    assert (error.kind, error.offset, error.name, error.name_whole) == ("truncated_header", 2048, "0002.txt", True)
    partly = read(FIVE[:2051])[1]
    assert partly is not None
    assert (partly.name, partly.name_whole) == ("000", False)


@pytest.mark.parametrize("length", [5120, 5632])
def test_without_the_end_marker(length: int) -> None:
    found, error, reader = read(FIVE[:length])
    assert len(found) == 5
    assert error is None
    assert reader.counts["no_end_marker"] == 1


def test_nothing_but_padding_missing() -> None:
    found, error, reader = read(FIVE[: 4 * 1024 + 512 + 6])
    assert found[-1][1] == b"text 4"
    assert error is None
    assert reader.counts["no_end_marker"] == 1


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b"<html>Forbidden</html>" * 100, "not_a_tar"),
        (b"short", "not_a_tar"),
        (b"BZh91AY&SY" * 100, "not_a_tar"),
        (FIVE[:300], "truncated_header"),
    ],
)
def test_no_tar_at_all(data: bytes, kind: str) -> None:
    found, error, _ = read(data)
    assert not found
    assert error is not None
    assert (error.kind, error.offset) == (kind, 0)
    if kind == "not_a_tar":
        assert "bzip2" in error.detail if data.startswith(b"BZh") else repr(data[:5])[1:-1] in error.detail


def test_zeros_alone() -> None:
    assert read(bytes(10240))[:2] == ([], None)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1024, 1 << 20])
def test_a_claim_of_20_gib_allocates_nothing(sized: bool, chunk_bytes: int) -> None:
    claim = b"\x80" + (20 << 30).to_bytes(11, "big")
    data = archive([("a.txt", b"a")])[:1024] + header("big.jpg", size=claim) + bytes(100)
    tracemalloc.start()
    found, error, _ = read(data, sized=sized, chunk_bytes=chunk_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert names(found) == ["a.txt"]
    assert error is not None
    assert (error.kind, error.offset, error.name) == ("truncated_member", 1024, "big.jpg")
    assert peak < 1 << 20


@pytest.mark.parametrize("size", [b"\xff" * 12, b"-0000000017\0", b"hello world\0", b"\x80" + b"\xff" * 11])
def test_bad_size(size: bytes) -> None:
    error = read(FIVE[:1024] + header("neg.jpg", size=size))[1]
    assert error is not None
    assert (error.kind, error.offset, error.name) == ("bad_size", 1024, "neg.jpg")


@pytest.mark.parametrize("size", [b"           3", b"3 ", b"00000000003 ", b"000000000003", b"\x80" + bytes(10) + b"\3"])
def test_spellings_of_a_size(size: bytes) -> None:
    found, error, _ = read(header(size=size) + b"abc".ljust(512, b"\0") + header("b.txt"))
    assert error is None
    assert [(member.name, content) for member, content in found] == [("a.bin", b"abc"), ("b.txt", b"")]


def test_signed_checksum() -> None:
    block = header("é.txt", sum_of=signed_checksum)
    assert signed_checksum(block) != checksum(block)
    assert names(read(block)[0]) == ["é.txt"]


@pytest.mark.parametrize("spelling", [b"%06o\0 ", b"%07o\0", b"%6o \0", b"%07o "])
def test_spellings_of_a_checksum(spelling: bytes) -> None:
    block = bytearray(header())
    block[148:156] = spelling % checksum(bytes(block))
    assert names(read(bytes(block))[0]) == ["a.bin"]


def test_old_headers() -> None:
    data = (
        header("dir/", kind=b"\0", magic=b"", size=b"00000001750\0")
        + header("dir/a.txt", kind=b"\0", magic=b"", size=b"00000000001\0")
        + b"x".ljust(512, b"\0")
    )
    found, error, reader = read(data)
    assert error is None
    assert names(found) == ["dir/a.txt"]
    assert reader.counts["skipped_directory"] == 1


def test_ustar_prefix() -> None:
    name = f"{'d' * 100}/{'n' * 90}.jpg"
    found, _, _ = read(archive([(name, b"1")]))
    assert names(found) == [name]


@pytest.mark.parametrize("longest", [1, 31, 32, 33, 40, 94, 95, 96, 97, 98, 99, 100])
def test_names_of_every_length_are_taken_whole_many_at_once(longest: int) -> None:
    wanted = [chr(97 + number % 26) * (longest if number == 20 else min(longest, 1 + number)) for number in range(40)]
    found, error, _ = read(archive([(name, b"1") for name in wanted]))
    assert error is None
    assert names(found) == wanted


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(form: int) -> None:
    long = f"{'d' * 120}/{'k' * 150}.jpg"
    found, error, _ = read(archive([(long, b"1"), ("日本語.jpg", b"2"), ("plain.jpg", b"3")], form=form))
    assert error is None
    assert names(found) == [long, "日本語.jpg", "plain.jpg"]
    assert found[0][0].header_offset == 0
    assert found[0][0].offset > 1024


def test_pax_before_every_member_and_global() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "a commit"}) as tar:
        for name in ("a.jpg", "b.jpg"):
            info = tarfile.TarInfo(name)
            info.mtime = 1_700_000_000.125  # a fraction makes tarfile write a PAX header
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    found, error, reader = read(out.getvalue())
    assert error is None
    assert names(found) == ["a.jpg", "b.jpg"]
    assert not reader.shared


def record(text: bytes) -> bytes:
    """One PAX record: its own length counts, digits and all."""
    length = len(text) + 2
    while len(b"%d %s\n" % (length, text)) != length:
        length += 1
    return b"%d %s\n" % (length, text)


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    """A PAX extension header with these records."""
    return header("PaxHeaders/x", kind=kind, size=b"%011o\0" % len(records)) + records + bytes(-len(records) % 512)


def test_pax_size_wins_over_the_header() -> None:
    data = pax(record(b"size=3")) + header("a.txt", size=b"00000000000\0") + b"abc".ljust(512, b"\0") + header("b.txt")
    assert [(member.name, content) for member, content in read(data)[0]] == [("a.txt", b"abc"), ("b.txt", b"")]


def test_global_size_and_path_are_honoured() -> None:
    data = pax(record(b"size=3"), b"g") + header("a.txt") + b"abc".ljust(512, b"\0") + header("b.txt") + b"def".ljust(512, b"\0")
    assert [content for _, content in read(data)[0]] == [b"abc", b"def"]


@pytest.mark.parametrize("size", [b"-3", b"1e3", b"99999999999999999999"])
def test_bad_pax_size(size: bytes) -> None:
    error = read(pax(record(b"size=" + size)) + header())[1]
    assert error is not None
    assert error.kind == "bad_size"


@pytest.mark.parametrize("records", [b"99 path=a\n", b"x path=a\n", b"0 path=a\n", b"8 path=a\n", b"9 path a\n", b"5 =aa\n"])
def test_bad_pax_records(records: bytes) -> None:
    error = read(pax(records) + header())[1]
    assert error is not None
    assert (error.kind, error.offset) == ("bad_header", 0)


def test_extension_headers_are_bounded() -> None:
    long = header("././@LongLink", kind=b"L", size=b"%011o\0" % (1 << 21))
    error = read(long + bytes(1 << 21))[1]
    assert error is not None
    assert error.kind == "bad_header"
    chain = (header("././@LongLink", kind=b"L", size=b"%011o\0" % (1 << 19)) + b"n".ljust(1 << 19, b"\0")) * 10
    error = read(chain)[1]
    assert error is not None
    assert error.kind == "bad_header"


def test_an_extension_without_its_member() -> None:
    for tail in (b"", bytes(1024)):
        error = read(pax(record(b"path=abc")) + tail)[1]
        assert error is not None
        assert error.kind == ("truncated_header" if not tail else "bad_checksum")
        assert error.name == "abc"


def test_links_and_devices_are_skipped() -> None:
    kinds = {b"1": "hard_link", b"2": "symbolic_link", b"3": "device", b"4": "device", b"5": "directory", b"6": "fifo"}
    data = b"".join(header(f"{kind.decode()}.txt", kind=kind) for kind in kinds) + header("a.txt")
    found, error, reader = read(data)
    assert error is None
    assert names(found) == ["a.txt"]
    assert found[0][0].header_offset == 6 * 512
    assert dict(reader.counts) == {
        "skipped_hard_link": 1,
        "skipped_symbolic_link": 1,
        "skipped_device": 2,
        "skipped_directory": 1,
        "skipped_fifo": 1,
        "no_end_marker": 1,
    }


def test_another_volume_is_refused() -> None:
    error = read(header("a.txt", kind=b"M"))[1]
    assert error is not None
    assert error.kind == "unsupported"


def test_gnu_sparse_is_refused_and_passed_over() -> None:
    sparse = bytearray(header("sp.bin", kind=b"S", size=b"00000001000\0", magic=b"ustar  \0"))
    sparse[482] = 1
    sparse[148:156] = b"%06o\0 " % checksum(bytes(sparse))
    more = bytearray(512)
    more[504] = 1
    data = bytes(sparse) + bytes(more) + bytes(512) + b"d" * 512 + header("b.txt")
    found, error, reader = read(data)
    assert error is None
    assert names(found) == ["sp.bin", "b.txt"]
    assert [reader.refused[0][0], len(reader.refused)] == ["sparse", 1]
    # header, two map blocks, one block of content
    assert found[1][0].header_offset == 4 * 512


def test_pax_sparse_is_refused_under_its_own_name() -> None:
    records = record(b"GNU.sparse.major=1") + record(b"GNU.sparse.name=d/sp.bin")
    found, _, reader = read(pax(records) + header("d/GNUSparseFile.0/sp.bin", size=b"00000001000\0") + b"d" * 512 + header("b.txt"))
    assert names(found) == ["d/sp.bin", "b.txt"]
    assert reader.refused[0][0] == "sparse"


def test_concatenated_archives_are_read_to_the_end() -> None:
    found, error, reader = read(FIVE + bytes(512) + FIVE + archive([("z.txt", b"z")], form=tarfile.PAX_FORMAT))
    assert error is None
    assert len(found) == 11
    assert not reader.counts


@pytest.mark.parametrize("blocks", [31, 32, 33, 65, 5000])
@pytest.mark.parametrize("chunk_bytes", [1024, 20 * 512, 1 << 20])
def test_runs_of_zeros_of_any_length_are_passed(blocks: int, chunk_bytes: int) -> None:
    found, error, reader = read(FIVE + bytes(512 * blocks) + FIVE, chunk_bytes=chunk_bytes)
    assert error is None and not reader.counts
    assert [member.header_offset for member, _ in found[5:]] == [len(FIVE) + 512 * blocks + 1024 * number for number in range(5)]
    # The last member ends after its header and one block of text.
    assert reader.end == len(FIVE) + 512 * blocks + 5 * 1024


def test_garbage_after_the_end_is_told() -> None:
    found, error, _ = read(FIVE + b"garbage" * 100)
    assert len(found) == 5
    assert error is not None
    assert (error.kind, error.offset) == ("bad_checksum", len(FIVE))


def test_long_members_are_gathered_or_skipped() -> None:
    content = bytes(range(256)) * 64
    data = archive([("a.bin", content), ("b.txt", b"b"), ("c.bin", content)])
    assert [found for _, found in read(data, chunk_bytes=2048)[0]] == [content, b"b", content]
    reader = MemberReader(Forward(data), chunk_bytes=2048, want=lambda member: member.name != "a.bin")
    blocks = list(reader.blocks())
    assert [(block.members[0].name, len(block.buffer) > 0) for block in blocks] == [("a.bin", False), ("b.txt", True), ("c.bin", True)]


def test_too_large_members_are_refused() -> None:
    data = archive([("a.bin", bytes(9000)), ("b.txt", b"b")])
    reader = MemberReader(Forward(data), chunk_bytes=2048, max_member_bytes=8192)
    found: list[Block] = list(reader.blocks())
    assert [member.name for block in found for member in block.members] == ["a.bin", "b.txt"]
    assert reader.refused[0][0] == "too_large"


def test_headers_alone_skip_what_they_can() -> None:
    data = archive([(f"{number}.bin", bytes(100_000)) for number in range(10)])
    stream = Forward(data, seekable=True, sized=True)
    reader = MemberReader(stream, contents=False, chunk_bytes=4096)
    assert len([member for block in reader.blocks() for member in block.members]) == 10
    assert stream.largest_read == 4096


FILE_NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60).filter(
    lambda name: name.strip("/. ") == name
)
FILES = st.lists(st.tuples(FILE_NAMES, st.binary(max_size=1500)), max_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)
@given(
    FILES,
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]),
    st.sampled_from([1024, 2048, 1 << 20]),
    st.booleans(),
)
def test_reads_what_tarfile_writes(files: list[tuple[str, bytes]], form: int, chunk_bytes: int, seekable: bool) -> None:
    if form == tarfile.USTAR_FORMAT:
        files = [(name.encode("ascii", "replace").decode().replace("?", "q"), content) for name, content in files]
    data = archive(files, form=form)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = []
        for info in tar:
            reader = tar.extractfile(info)
            assert reader is not None
            expected.append((info.name, info.offset, info.offset_data, info.size, reader.read()))
    found, error, _ = read(data, chunk_bytes=chunk_bytes, seekable=seekable)
    assert error is None
    assert [(member.name, member.header_offset, member.offset, member.size, content) for member, content in found] == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=200)
@given(st.integers(0, len(FIVE) - 1), st.integers(0, 7), st.sampled_from([1024, 1 << 20]))
def test_any_flipped_bit_is_told_or_harmless(place: int, bit: int, chunk_bytes: int) -> None:
    data = bytearray(FIVE)
    data[place] ^= 1 << bit
    found, error, _ = read(bytes(data), chunk_bytes=chunk_bytes)
    hit = place // 1024
    if place >= 5120:
        assert len(found) == 5 and error is not None
    elif place % 1024 < 512 and error is not None:
        assert len(found) == hit
        assert error.offset == 1024 * hit
    else:
        # in a member's content or padding, where a tar has no check; or a spelling of the same number
        assert error is None and len(found) == 5


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=200)
@given(st.integers(0, len(FIVE)), st.sampled_from([1024, 1 << 20]), st.booleans())
def test_any_cut_gives_every_member_before_it(length: int, chunk_bytes: int, sized: bool) -> None:
    found, error, reader = read(FIVE[:length], chunk_bytes=chunk_bytes, sized=sized)
    # a member is whole once its 6 bytes are there
    assert len(found) == min(5, max(0, length - 518 + 1024) // 1024)
    assert error is not None or reader.counts["no_end_marker"] or length >= 5 * 1024 + 1024


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(st.binary(max_size=3000))
def test_any_bytes_end_in_a_tar_error_or_in_peace(data: bytes) -> None:
    read(data)
    read(FIVE[:1024] + data)
