"""Hostile and honest archives against `ingest_tar`: nothing outside the target ever changes, and what is applied is
exact."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.errors import LimitExceeded, SnapshotdError, UsageError
from snapshotd.formats.ingest import IngestReport, TarLimits, ingest_tar
from tests import long
from tests.archives import PAST_S, archive, directory, entry, fixed_checksum, link, pax_record, raw_header, with_size

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="makes device nodes")


def apply(
    target: Path, *entries: tuple[tarfile.TarInfo, bytes], whiteouts: bool = False, limits: TarLimits | None = None
) -> IngestReport:
    return apply_bytes(target, archive(*entries), whiteouts=whiteouts, limits=limits)


def apply_bytes(target: Path, data: bytes, *, whiteouts: bool = False, limits: TarLimits | None = None) -> IngestReport:
    fd = os.open(target, os.O_PATH | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    try:
        return ingest_tar(io.BytesIO(data), fd, oci_whiteouts=whiteouts, limits=limits)
    finally:
        assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor leaked"
        os.close(fd)


def tree(root: Path) -> dict[str, str]:
    found = {}
    for base, directories, names in os.walk(root):
        for name in directories + names:
            path = Path(base, name)
            key = os.path.relpath(path, root)
            if path.is_symlink():
                found[key] = "-> " + os.readlink(path)
            elif path.is_dir():
                found[key] = "/"
            else:
                found[key] = path.read_text() if path.is_file() else "special"
    return found


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """An empty directory beside a file that no archive may touch."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("untouched")
    os.utime(outside / "victim", (1, 1))
    before = (outside / "victim").stat()
    inside = tmp_path / "target"
    inside.mkdir()
    yield inside
    after = (outside / "victim").stat()
    assert sorted(os.listdir(tmp_path)) == ["outside", "target"]
    assert os.listdir(outside) == ["victim"]
    assert (outside / "victim").read_text() == "untouched"
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink, after.st_uid) == (
        before.st_mode,
        before.st_mtime_ns,
        before.st_nlink,
        before.st_uid,
    )


# -- honest archives ---------------------------------------------------------------------------------------------------


def test_everything_a_root_file_system_has(target: Path) -> None:
    report = apply(
        target,
        directory("./", mode=0o750),
        directory("etc", mode=0o711),
        entry("etc/passwd", data=b"root", mode=0o4755),
        link("bin", "usr/bin"),
        link("dangling", "/nowhere"),
        entry("pipe", tarfile.FIFOTYPE, mode=0o600),
        link("etc/same", "etc/passwd", tarfile.LNKTYPE),
        entry("deep/er/file", data=b"x"),
    )
    assert (report.files, report.directories, report.bytes, report.warnings) == (6, 3, 5, ())
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    assert stat.S_IMODE((target / "etc").stat().st_mode) == 0o711
    assert stat.S_IMODE((target / "etc/passwd").stat().st_mode) == 0o4755
    assert (target / "etc/passwd").stat().st_ino == (target / "etc/same").stat().st_ino
    assert os.readlink(target / "bin") == "usr/bin"
    assert os.readlink(target / "dangling") == "/nowhere"
    assert stat.S_ISFIFO((target / "pipe").stat().st_mode)
    assert stat.S_IMODE((target / "deep").stat().st_mode) == 0o755
    for path in (".", "etc", "etc/passwd", "bin", "pipe", "deep", "deep/er", "deep/er/file"):
        assert (target / path).lstat().st_mtime == PAST_S, path


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_each_format_with_names_at_its_limit(target: Path, tar_format: int) -> None:
    long = (
        "d" * 90 + "/" + "f" * 90
        if tar_format == tarfile.USTAR_FORMAT
        else "/".join(["d" * 200] * 10) + "/" + "f" * 255
    )
    apply_bytes(
        target,
        archive(entry(long, data=b"1"), link("l", "t" * (99 if "d" * 91 not in long else 3000)), tar_format=tar_format),
    )
    assert (target / long).read_bytes() == b"1"
    assert set(os.readlink(target / "l")) == {"t"}


def test_names_are_bytes(target: Path) -> None:
    apply(target, entry(b"caf\xe9\n\x1b[31m", data=b"1"))
    assert os.listdir(os.fsencode(target)) == [b"caf\xe9\n\x1b[31m"]


def test_extended_attributes(target: Path) -> None:
    records = {b"SCHILY.xattr.user.note": b"a\nb=c", b"SCHILY.xattr.user.bin": b"\xff\0\xfe"}
    report = apply_bytes(target, raw_pax(records) + archive(entry("f", data=b"x")))
    assert report.warnings == ()
    assert os.getxattr(target / "f", "user.note") == b"a\nb=c"
    assert os.getxattr(target / "f", "user.bin") == b"\xff\0\xfe"


def test_zeros_become_holes(target: Path) -> None:
    apply(target, entry("zeros", data=bytes(8 << 20)))
    st = (target / "zeros").stat()
    assert st.st_size == 8 << 20
    assert st.st_blocks * 512 < 1 << 20
    assert (target / "zeros").read_bytes() == bytes(8 << 20)


def test_a_later_member_replaces_an_earlier_one(target: Path) -> None:
    apply(
        target,
        entry("a", data=b"old"),
        link("b", "a", tarfile.LNKTYPE),
        entry("a", data=b"new"),
        directory("d"),
        entry("d/x", data=b"x"),
        entry("d", data=b"now a file"),
        link("e", "../outside"),
        directory("e"),
        entry("e/new", data=b"1"),
    )
    assert tree(target) == {"a": "new", "b": "old", "d": "now a file", "e": "/", "e/new": "1"}


def test_a_repeated_directory_keeps_what_is_in_it(target: Path) -> None:
    apply(target, directory("d", mode=0o700), entry("d/x", data=b"1"), directory("d", mode=0o755))
    assert tree(target) == {"d": "/", "d/x": "1"}
    assert stat.S_IMODE((target / "d").stat().st_mode) == 0o755


@ROOT_ONLY
def test_device_nodes_are_nodes(target: Path) -> None:
    null = entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666)
    apply(target, null, entry("disk", tarfile.BLKTYPE, devmajor=254, devminor=0))
    assert (target / "null").stat().st_rdev == os.makedev(1, 3)
    assert stat.S_ISBLK((target / "disk").stat().st_mode)


@ROOT_ONLY
def test_owners_and_ids_no_sandbox_has(target: Path) -> None:
    report = apply(target, entry("a", uid=33, gid=44), entry("b", uid=3_000_000, gid=5), link("c", "a"))
    assert ((target / "a").stat().st_uid, (target / "a").stat().st_gid) == (33, 44)
    assert ((target / "b").stat().st_uid, (target / "b").stat().st_gid) == (0, 5)
    assert len(report.warnings) == 1


# -- B1: names that leave the tree -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside/victim", "a/../../outside/victim", "a/..", "..", "./../x", "a/b/../c"])
def test_dot_dot_is_refused(target: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"contains `\.\.`"):
        apply(target, entry(name, data=b"pwned"))


def test_absolute_names_are_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="is absolute"):
        apply(target, entry(str(target.parent / "outside/victim"), data=b"pwned"))


def test_a_zero_byte_in_a_name_is_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="zero byte"):
        apply_bytes(target, raw_pax({b"path": b"a\0b"}) + archive(entry("x")))


@pytest.mark.parametrize(
    ("name", "layer"), [("x" * 256, False), ("d/" * (2 << 20) + "d", False), ("/".join(["d" * 100] * 41), True)]
)
def test_names_longer_than_any_path_are_refused(target: Path, name: str, layer: bool) -> None:
    with pytest.raises(LimitExceeded, match="longer than a path"):
        apply(target, entry(name), whiteouts=layer)


def test_the_message_does_not_carry_control_characters(target: Path) -> None:
    with pytest.raises(UsageError) as caught:
        apply(target, entry(b"../\x1b[31mevil\n"))
    assert caught.value.message.isprintable()


# -- B2: through links -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["../outside", "/etc", ".", "/proc/self/root"])
def test_members_below_a_link_are_refused(target: Path, to: str) -> None:
    with pytest.raises(UsageError, match="passes through"):
        apply(target, link("d", to), entry("d/victim", data=b"pwned"))


def test_members_below_a_link_in_the_middle_are_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="passes through"):
        apply(target, directory("a"), link("a/l", "../../outside"), entry("a/l/b/c/d", data=b"pwned"))


def test_a_directory_entry_over_a_link_does_not_dress_its_target(target: Path) -> None:
    apply(target, link("d", "../outside"), directory("d", mode=0o777))
    assert not (target / "d").is_symlink()
    assert stat.S_IMODE((target.parent / "outside").stat().st_mode) == 0o755


def test_a_file_over_a_link_does_not_write_through_it(target: Path) -> None:
    apply(target, link("f", "../outside/victim"), entry("f", data=b"mine"))
    assert tree(target) == {"f": "mine"}


def test_members_below_a_file_are_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="passes through"):
        apply(target, entry("f", data=b"1"), entry("f/g", data=b"2"))


# -- B3: hard links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "to", ["../outside/victim", "/etc/passwd", "missing", "missing/deeper", "d", "", "h", "d/l/victim"]
)
def test_hard_links_to_anything_but_an_entry_are_refused(target: Path, to: str) -> None:
    with pytest.raises(UsageError, match="hard link"):
        apply(target, directory("d"), link("d/l", "../../outside"), link("h", to, tarfile.LNKTYPE))


def test_a_hard_link_to_a_link_is_a_second_name_of_the_link(target: Path) -> None:
    apply(target, link("l", "../outside/victim"), link("h", "l", tarfile.LNKTYPE), entry("h", data=b"mine"))
    assert tree(target) == {"l": "-> ../outside/victim", "h": "mine"}


def test_writing_over_a_hard_link_leaves_the_other_name_alone(target: Path) -> None:
    apply(target, entry("a", data=b"one"), link("b", "a", tarfile.LNKTYPE), entry("b", data=b"two"))
    assert tree(target) == {"a": "one", "b": "two"}


def test_a_hard_link_into_the_directory_it_replaces_is_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="hard link"):
        apply(target, directory("d"), entry("d/x"), link("d", "d/x", tarfile.LNKTYPE))


# -- A20 to A22: overlay marks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "trusted.overlay.opaque",
        "trusted.overlay.redirect",
        "trusted.overlay.metacopy",
        "user.overlay.opaque",
        "user.overlay.redirect",
        "trusted.anything",
        "security.ima",
        "security.selinux",
    ],
)
def test_marks_and_labels_are_left_out(target: Path, name: str) -> None:
    report = apply_bytes(target, raw_pax({b"SCHILY.xattr." + name.encode(): b"y"}) + archive(directory("d")))
    assert os.listxattr(target / "d") == []
    assert len(report.warnings) == (0 if name == "security.selinux" else 1)
    assert name == "security.selinux" or name in report.warnings[0]


def test_an_attribute_that_linux_cannot_have_is_refused(target: Path) -> None:
    """It is left out with a warning only where the file system has no room for it."""
    long = b"SCHILY.xattr.user." + b"n" * 251
    with pytest.raises(UsageError, match=r"cannot write f: .*leave it out"):
        apply_bytes(target, raw_pax({long: b"1"}) + archive(entry("f")))


def test_a_forged_whiteout_is_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="0:0"):
        apply(target, entry("w", tarfile.CHRTYPE, devmajor=0, devminor=0))


def test_impossible_device_numbers_are_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="device number"):
        apply(target, entry("w", tarfile.CHRTYPE, devmajor=1 << 12, devminor=0))


def test_attributes_of_a_replaced_directory_do_not_stay(target: Path) -> None:
    apply_bytes(target, raw_pax({b"SCHILY.xattr.user.old": b"1"}) + archive(directory("d")))
    apply(target, directory("d"))
    assert os.listxattr(target / "d") == []


def test_a_default_access_list_is_not_inherited(target: Path) -> None:
    acl = bytes.fromhex("0200000001000700ffffffff04000500ffffffff10000700ffffffff20000000ffffffff")
    entries = archive(directory("d"), entry("d/f"), directory("d/s"), entry("d/i/f"))
    apply_bytes(target, raw_pax({b"SCHILY.xattr.system.posix_acl_default": acl}) + entries)
    assert os.listxattr(target / "d") == ["system.posix_acl_default"]
    assert [os.listxattr(target / "d" / name) for name in ("f", "s", "i", "i/f")] == [[], [], [], []]
    assert stat.S_IMODE((target / "d/f").stat().st_mode) == 0o644


# -- bombs and damage --------------------------------------------------------------------------------------------------


def test_too_many_members(target: Path) -> None:
    with pytest.raises(LimitExceeded, match="more than 3 members"):
        apply(target, *(entry(f"f{i}") for i in range(4)), limits=TarLimits(members=3))


def test_too_many_bytes_are_refused_before_they_are_written(target: Path) -> None:
    header = bytearray(archive(entry("bomb"))[:512])
    with pytest.raises(LimitExceeded, match="bytes"):
        apply_bytes(target, with_size(header, 1 << 40))
    assert os.listdir(target) == []


def test_negative_size(target: Path) -> None:
    header = bytearray(archive(entry("f"))[:512])
    header[124:136] = b"\xff" * 12
    with pytest.raises(UsageError, match="impossible size"):
        apply_bytes(target, fixed_checksum(header))


@pytest.mark.parametrize("text", [b"-5", b"1e3", b"99999999999999999999999", b"", b"9" * 5000])
def test_impossible_pax_sizes(target: Path, text: bytes) -> None:
    with pytest.raises(UsageError):
        apply_bytes(target, raw_pax({b"size": text}) + archive(entry("f")))


@pytest.mark.parametrize("text", [b"nan", b"", b"1e999", b"9" * 30, b"--1"])
def test_impossible_times(target: Path, text: bytes) -> None:
    with pytest.raises(UsageError, match="time"):
        apply_bytes(target, raw_pax({b"mtime": text}) + archive(entry("f")))


@pytest.mark.parametrize(("text", "seconds"), [(b"-1.5", -1.5), (b"9" * 20, None), (b"1.25", 1.25)])
def test_strange_times_are_cut_not_fatal(disk_path: Path, text: bytes, seconds: float | None) -> None:
    """As a disk's file system cuts them; memory has any time."""
    target = disk_path / "target"
    target.mkdir()
    apply_bytes(target, raw_pax({b"mtime": text}) + archive(entry("f")))
    os.utime(target.parent, ns=(0, ((1 << 63) - 1) * 10**9))
    assert (target / "f").stat().st_mtime == (target.parent.stat().st_mtime if seconds is None else seconds)


def test_gnu_sparse_files_are_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="sparse"):
        apply(target, entry("s", tarfile.GNUTYPE_SPARSE))
    with pytest.raises(UsageError, match="sparse"):
        apply_bytes(
            target, raw_pax({b"GNU.sparse.major": b"1", b"GNU.sparse.realsize": b"1000000000000"}) + archive(entry("s"))
        )


@pytest.mark.parametrize("kind", [b"M", b"V", b"D", b"Z", b"\xff"])
def test_unknown_kinds_are_refused(target: Path, kind: bytes) -> None:
    with pytest.raises(UsageError, match="unknown type"):
        apply_bytes(target, fixed_checksum(bytearray(archive(entry("f"))[:512]), kind=kind))


@pytest.mark.parametrize("kind", [b"x", b"L", b"K", b"g"])
def test_an_extension_header_that_claims_gigabytes_is_not_read(target: Path, kind: bytes) -> None:
    header = fixed_checksum(bytearray(with_size(bytearray(archive(entry("f"))[:512]), 8 << 30)), kind=kind)
    with pytest.raises(LimitExceeded, match="headers"):
        apply_bytes(target, header + bytes(4096))


def test_a_chain_of_extension_headers_ends(target: Path) -> None:
    with pytest.raises(LimitExceeded, match="extension headers"):
        apply_bytes(target, raw_pax({b"comment": b"x"}) * 5000 + archive(entry("f")))


@pytest.mark.parametrize(
    "records", [b"5 a=", b"99 a=b\n", b"6 a=b\nxx", b"0 a=b\n", b"x", b"7 =bcd\n", b"6 a=bc", b"11111111111111 a=b\n"]
)
def test_damaged_pax_records(target: Path, records: bytes) -> None:
    with pytest.raises(UsageError):
        apply_bytes(target, raw_header(b"x", records) + archive(entry("f")))


def test_global_records_that_change_members_are_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="all its members"):
        apply_bytes(target, raw_header(b"g", pax_record(b"path", b"../../x")) + archive(entry("f")))
    apply_bytes(target, raw_header(b"g", pax_record(b"comment", b"0123")) + archive(entry("f")))
    assert os.listdir(target) == ["f"]


def test_truncated_anywhere(target: Path) -> None:
    whole = archive(entry("a", data=b"x" * 700), directory("d"))
    for length in (1, 511, 513, 1000, 1535, 1537, 2000):
        with pytest.raises(UsageError):
            apply_bytes(target, whole[:length])
    assert apply_bytes(target, whole[:2048]).warnings == ("the archive has no end marker: it may have been cut off",)


def test_not_a_tar(target: Path) -> None:
    with pytest.raises(UsageError, match="not a tar"):
        apply_bytes(target, b"0" * 4096)


def test_random_damage_never_escapes_or_crashes(target: Path) -> None:
    """Every third byte of a small archive (in the short set every fifth), overwritten in turn with three values: a
    sentence or a success, nothing else. The short set has few of those that come after the end."""
    whole = archive(directory("d"), entry("d/f", data=b"1"), link("l", "d/f"), link("h", "d/f", tarfile.LNKTYPE))
    sentences = []
    end = 7 * 512  # four headers, a block of data, and the two that end it
    assert whole[end - 1024 : end] == bytes(1024)
    for position in (*range(0, end, long.size(5, 3)), *range(end, len(whole), long.size(99, 3))):
        for value in (0, 0x2E, 0xFF):
            data = bytearray(whole)
            data[position] = value
            if data == whole:
                continue
            block = position // 512 * 512
            if whole[block + 257 : block + 262] == b"ustar":
                data[block : block + 512] = fixed_checksum(data[block : block + 512])
            try:
                apply_bytes(target, bytes(data), limits=TarLimits(bytes=1 << 20))
            except SnapshotdError as exc:
                sentences.append(exc.message)
    assert sentences
    assert all(sentence.isprintable() for sentence in sentences)


# -- layers ------------------------------------------------------------------------------------------------------------


def test_whiteouts_delete_what_earlier_layers_brought(target: Path) -> None:
    apply(
        target,
        directory("d"),
        entry("d/gone", data=b"1"),
        entry("d/kept", data=b"2"),
        directory("t"),
        entry("t/x", data=b"3"),
    )
    apply(
        target, entry("d/.wh.gone"), entry(".wh.t"), entry("d/.wh.never-there"), entry("no/such/.wh.x"), whiteouts=True
    )
    assert tree(target) == {"d": "/", "d/kept": "2"}
    assert (target / "d").stat().st_mtime == PAST_S


@pytest.mark.parametrize("mark_first", [True, False])
def test_an_opaque_mark_spares_its_own_layer(target: Path, mark_first: bool) -> None:
    apply(
        target,
        directory("d"),
        entry("d/old", data=b"1"),
        directory("d/s"),
        entry("d/s/old", data=b"1"),
        entry("beside", data=b"1"),
    )
    mine = [directory("d"), entry("d/new", data=b"2"), entry("d/s/new", data=b"2")]
    mark = entry("d/.wh..wh..opq")
    apply(target, *([mark, *mine] if mark_first else [*mine, mark]), whiteouts=True)
    assert tree(target) == {"beside": "1", "d": "/", "d/new": "2", "d/s": "/", "d/s/new": "2"}


@pytest.mark.parametrize("mark_first", [True, False])
def test_a_whiteout_and_an_entry_of_one_name_in_one_layer(target: Path, mark_first: bool) -> None:
    apply(target, directory("d"), entry("d/old", data=b"1"), entry("f", data=b"1"))
    mine = [directory("d"), entry("d/new", data=b"2"), entry("f", data=b"2")]
    marks = [entry(".wh.d"), entry(".wh.f")]
    apply(target, *(marks + mine if mark_first else mine + marks), whiteouts=True)
    assert tree(target) == {"d": "/", "d/new": "2", "f": "2"}


@pytest.mark.parametrize("name", [".wh...", ".wh..", ".wh.", ".wh..wh.plnk", ".wh..wh.aufs"])
def test_strange_marks_delete_nothing(target: Path, name: str) -> None:
    apply(target, directory("d"), entry("d/x", data=b"1"))
    apply(target, entry("d/" + name), whiteouts=True)
    assert tree(target) == {"d": "/", "d/x": "1"}


def test_whiteouts_through_a_link_are_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="passes through"):
        apply(target, link("d", "../outside"), entry("d/.wh.victim"), whiteouts=True)
    with pytest.raises(UsageError, match="passes through"):
        apply(target, entry("d/.wh..wh..opq"), whiteouts=True)


def test_an_entry_below_a_mark_is_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="deletion mark"):
        apply(target, entry(".wh.d/x"), whiteouts=True)


def test_marks_are_plain_names_in_a_root_file_system(target: Path) -> None:
    apply(target, entry("a", data=b"1"), entry(".wh.a", data=b"2"))
    assert tree(target) == {"a": "1", ".wh.a": "2"}


# -- making headers by hand --------------------------------------------------------------------------------------------


def raw_pax(records: dict[bytes, bytes]) -> bytes:
    return raw_header(b"x", b"".join(pax_record(key, value) for key, value in records.items()))
