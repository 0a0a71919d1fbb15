"""A program for E2B: it knows nothing of snapshotd."""

from e2b import CommandExitException, Sandbox

with Sandbox.create(allow_internet_access=False) as sandbox:
    sandbox.files.write("app/config", "ok\n")
    print("config:", sandbox.commands.run("cat app/config").stdout.strip())
    kept = sandbox.create_snapshot(name="working")
    sandbox.commands.run("rm -r app")
    try:
        sandbox.commands.run("cat app/config")
    except CommandExitException as error:
        print("broken:", error.exit_code)
    with Sandbox.create(kept.snapshot_id) as earlier:
        print("earlier:", earlier.files.read("app/config").strip())
