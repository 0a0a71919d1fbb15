"""State directories on NFS: a loopback mount of the kernel's own server, in a guest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import guest
from tests.capabilities import require

_SERVE = """
import fcntl, os, socket, struct

FLAGS = 0x2 | 0x10 | 0x400 | 0x2000
def write(path, text):
    with open(path, "w") as file:
        file.write(text + "\\n")

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS, up and running
os.makedirs("/export")
os.makedirs("/var/lib/nfs/v4recovery")
for version in ("-3", "+4", "+4.1", "+4.2"):
    write("/proc/fs/nfsd/versions", version)
write("/proc/net/rpc/auth.unix.ip/channel", "nfsd 127.0.0.1 4102444800 here")
write("/proc/net/rpc/nfsd.export/channel", f"here /export 4102444800 {FLAGS} 65534 65534 0")
write("/proc/net/rpc/nfsd.fh/channel", r"here 1 \\x00000000 4102444800 /export")
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 2049))
    listener.listen(64)
    write("/proc/fs/nfsd/portlist", str(listener.fileno()))
write("/proc/fs/nfsd/threads", "2")
write("/proc/fs/nfsd/v4_end_grace", "Y")
"""
"""What `exportfs` and `rpc.mountd` tell the kernel (Documentation/filesystems/nfs/rpc-cache.rst): one export, whose root
users are not changed."""
_SCRIPT = r"""
set -eux
export SNAPSHOTD_WARM=0 TERM=dumb
mount -t nfsd nfsd /proc/fs/nfsd
python3 /root/serve.py
for version in 4.2 4.1; do
    mkdir /nfs$version
    mount -i -t nfs4 -o vers=$version,addr=127.0.0.1,clientaddr=127.0.0.1 127.0.0.1:/ /nfs$version
done
useradd --home-dir /nfs4.2/person --create-home person
person() { version=$1; shift; setpriv --reuid=person --regid=person --init-groups --inh-caps=-all env HOME=/nfs$version/person "$@"; }
sd() { person 4.2 snapshotd "$@"; }
refused() { if "$@" > said 2>&1; then exit 1; fi; cat said; }
started() {  # it takes more than a minute on a busy machine
    while ! "$@" 2> heard; do
        grep 'starting for more than' heard || { cat heard; return 1; }
    done
}

: without attributes of users there is no way
for mode in '' folder; do
    refused started person 4.1 SNAPSHOTD_MODE=$mode snapshotd ls
    grep 'the file system of /nfs4.1/person/.*/layers keeps no extended attributes of users' said
done

: an ordinary user has no sandboxes, but plain folders
refused started sd create --image minimal
grep 'cannot run sandboxes in the mode rootless: overlays: .*--isolation none' said
sd doctor > report || true
grep 'not on an overlay or a network file system' report
started sd create --isolation none --name box
sd exec box -- sh -c 'mkdir d; echo one > d/f; ln d/f g; echo secret > h; chmod 600 h'
sd tag box first
sd exec box -- sh -c 'rm -r d h; mkdir d; echo new > d/n'
echo given > /tmp/given
sd cp /tmp/given box:there
[ "$(sd exec box -- cat d/n g there)" = "$(printf 'new\none\ngiven')" ]
sd fork first --name other
[ "$(sd exec other -- cat d/f g h)" = "$(printf 'one\none\nsecret')" ]
sd rewind box first
sd exec --wait stored box -- sh -c '[ "$(cat d/f)" = one ] && [ ! -e d/n ] && [ ! -e there ] && [ d/f -ef g ]'
sd restore first --to /nfs4.2/person/out
grep secret /nfs4.2/person/out/workspace/h
sd check --read-data | grep ' 0 damaged'
sd daemon --stop

: the daemon of root has a disk image there
export SNAPSHOTD_STATE_DIR=/nfs4.2/state
started snapshotd create --image minimal --name box
snapshotd exec box -- sh -c 'mkdir d; echo one > d/f'
snapshotd exec --wait stored box -- sh -c 'mv d e; cat e/f'
snapshotd log box | grep stored
snapshotd check --read-data | grep ' 0 damaged'
snapshotd daemon --stop
[ -f /nfs4.2/state/layers.img ]
echo NFS OK
"""


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_a_state_directory_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("qemu")
    monkeypatch.setattr(guest, "MODULES", (*guest.MODULES, "nfsd", "nfsv4"))
    serve = tmp_path / "serve.py"
    serve.write_text(_SERVE)
    ended = guest.run(guest.OLDEST, _SCRIPT, timeout_s=1900, files={"/root/serve.py": serve})
    assert ended.status == 0, ended.said[-8000:]
    assert "NFS OK" in ended.said
