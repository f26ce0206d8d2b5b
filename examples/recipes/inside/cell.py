"""Run one cell in a Jupyter kernel that is up, through its client, and print what a notebook would show below it.

cell.py CONNECTION_FILE CODE
"""

from __future__ import annotations

import sys

from jupyter_client import BlockingKernelClient


def main() -> None:
    client = BlockingKernelClient(connection_file=sys.argv[1])
    client.load_connection_file()
    client.start_channels()
    client.wait_for_ready(timeout=60)

    def show(message: dict) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            sys.stdout.write(content["text"])
        elif kind == "execute_result":
            print(f"[{content['execution_count']}] {content['data']['text/plain']}")

    reply = client.execute_interactive(sys.argv[2], output_hook=show, timeout=60)
    if reply["content"]["status"] != "ok":
        sys.exit(f"{reply['content']['ename']}: {reply['content']['evalue']}")


if __name__ == "__main__":
    main()
