"""Put a program into a sandbox, change it, and take the result out."""

from snapshotd.client import Sandbox

with Sandbox.create() as sandbox:
    written = sandbox.files.write("app.sh", "echo one > out.txt\n")
    sandbox.files.write_many({"data/a.csv": "1,2\n", "data/b.csv": b"3,4\n"})
    sandbox.exec("sh app.sh", check=True)
    for item in sandbox.files.list():
        print(item.kind, item.name, item.size)

    sandbox.files.write("app.sh", "echo two > out.txt\n")
    sandbox.exec("sh app.sh", check=True)
    print(sandbox.files.read_text("out.txt").strip(), "in the sandbox")

    first = sandbox.snapshots()[1]
    print(first.info.tool.name, first.info.tool.arguments)
    sandbox.rewind(first)
    print(sandbox.files.read_text("app.sh").strip(), "after the rewind")
    print(sandbox.files.exists("data"), sandbox.files.exists("out.txt"))

    report = sandbox.files.download("/workspace", "copy")
    print(report.file_count, "file copied")
sandbox.remove()
