from snapshotd.client import Sandbox

with Sandbox.create() as sandbox:
    sandbox.files.write("/workspace/hello.py", "print('hello')\n")
    result = sandbox.exec("python3 /workspace/hello.py")
    print(result.stdout, end="")
    forks = sandbox.fork(2)
    for fork in forks:
        print(fork.exec("cat /workspace/hello.py").stdout, end="")
        fork.remove(force=True)
