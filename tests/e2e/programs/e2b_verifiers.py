"""The E2B runtime of verifiers, as a rollout uses it: a template of an image, setup, the program, files, a server."""

import asyncio
import json
import sys

from verifiers.v1.runtimes.e2b import E2BConfig, E2BRuntime


async def main() -> None:
    runtime = E2BRuntime(E2BConfig(image=sys.argv[1], creates_per_sec=None), name="test")
    await runtime.start()
    try:
        done = await runtime.run(["sh", "-c", "id -un; pwd; echo $A; echo err >&2; exit 3"], {"A": "b"})
        assert (done.exit_code, done.stdout, done.stderr) == (3, "root\n/app\nb\n", "err\n"), done
        data = bytes(range(256)) * 1000
        await runtime.write("/app/data", data)
        assert await runtime.read("/app/data") == data
        done = await runtime.run_program(["sh", "-c", "wc -c < data; echo made > made"], {})
        assert (done.exit_code, done.stdout) == (0, "256000\n"), done
        process = await runtime.open_process(["cat"], {})
        await process.write(b"typed\n\xff")
        said = b""
        async for piece in process.stdout:
            said += piece
            if said == b"typed\n\xff":
                break
        sys.stdout.write(json.dumps({"sandbox": runtime.info.id}))
    finally:
        await runtime.stop()


asyncio.run(main())
