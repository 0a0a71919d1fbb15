"""Start a server in a sandbox, ask it while other calls go on, talk to a program, and end both."""

import time
import urllib.request

from snapshotd.client import Sandbox

with Sandbox.create() as sandbox:
    sandbox.files.write("index.html", "hello\n")
    server = sandbox.exec("exec python3 -u -m http.server 8000", background=True)
    with sandbox.port(8000) as port:
        while True:
            try:
                page = urllib.request.urlopen(f"http://{port.address}/").read()
                break
            except OSError:  # it does not listen yet
                time.sleep(0.05)
    print(page.decode().strip(), "from", server.info.status, "server")

    sums = sandbox.exec(["python3", "-u", "-c", "while True: print(eval(input()))"], background=True, stdin=True)
    sums.write("6 * 7\n")
    print(next(sums.lines(follow=True)), "is the first line that it prints")

    again = sandbox.command(server.id)
    again.kill()
    print(again.wait().exit_code, "is the exit code of a killed command")
    sums.write(b"", end=True)
    result = sums.wait()
    print(result.exit_code, result.stderr.splitlines()[-1])
    print([(one.info.status, one.info.exit_code) for one in sandbox.commands()])
    print(sandbox.head().id == result.snapshot_id)
sandbox.remove()
