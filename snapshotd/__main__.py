"""The command `snapshotd`, and `python -m snapshotd`."""

import gc
import signal
import sys


def main() -> int:
    """Run this process's command line. Returns the exit code.

    Until the command runs, and once it has ended, Ctrl-C ends the process by the signal itself: the interpreter would
    print where it was. Where SIGINT is ignored (`nohup`, a job in the background of a script) it stays ignored.
    """
    gc.disable()  # Imported modules stay; searching them for garbage is 3 ms. The command turns it on again as it begins.
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        return _command()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import snapshotd.cli.main  # noqa: F401 - a third of a second of imports

    try:
        signal.signal(signal.SIGINT, handler)
        return _command()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _command() -> int:
    from snapshotd.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
