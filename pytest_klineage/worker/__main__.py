"""Entry of a worker: `python -m pytest_klineage.worker ROLE FD [--preload torch]`; FD is its channel to the judge.

--preload says what a template imports before it forks: see worker/ahead.py.
"""

from __future__ import annotations

import argparse
import os
import sys

from pytest_klineage.channel import Channel, ChannelClosed
from pytest_klineage.worker import ahead
from pytest_klineage.worker.sandbox import containment


def main(arguments: list[str]) -> int:
    """Run one role until the judge closes the channel."""
    parser = argparse.ArgumentParser(prog="pytest_klineage.worker")
    parser.add_argument("role", choices=("oracle", "template"))
    parser.add_argument("fd", type=int)
    parser.add_argument("--preload", type=ahead.parsed, default=("none", ()))
    options = parser.parse_args(arguments)
    containment.die_with_parent()
    kind, modules = options.preload
    if modules and (safe := ahead.import_ahead(modules, ahead.touches_gpu)) != modules:
        # Again in a fresh process image, without the module that has opened the GPU and those imported by it.
        again = [options.role, str(options.fd), "--preload", ":".join((kind, ",".join(safe)))]
        os.execv(sys.executable, [sys.executable, "-P", "-s", "-m", "pytest_klineage.worker", *again])
    channel = Channel.from_fd(options.fd)
    try:
        if options.role == "oracle":
            from pytest_klineage.worker.oracle import Oracle

            containment.forbid_inspection()
            Oracle(channel).serve()
        else:
            from pytest_klineage.worker.template import Template

            Template(channel, preload=kind).serve()
    except (ChannelClosed, KeyboardInterrupt):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
