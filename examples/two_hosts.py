"""What `paceline run` does on two hosts, tried on one machine: two launchers that meet at an
endpoint, each with ranks of its own.

    python examples/two_hosts.py                        # trains examples/tabular.py on 2 x 1 ranks
    python examples/two_hosts.py --ranks 2 my_script.py
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent


@contextlib.contextmanager
def reserved_endpoint() -> Iterator[str]:
    """An address of this machine that no other program is given meanwhile."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reservation.getsockname()[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("script", nargs="?", default=str(HERE / "tabular.py"))
    options, arguments = parser.parse_known_args()
    with reserved_endpoint() as endpoint:
        launchers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "paceline", "run"),
                    *("-n", str(options.ranks), "--nnodes", "2", "--node-rank", str(node)),
                    *("--rdzv-endpoint", endpoint, options.script, *arguments),
                ]
            )
            for node in range(2)
        ]
        return max(launcher.wait() for launcher in launchers)


if __name__ == "__main__":
    sys.exit(main())
