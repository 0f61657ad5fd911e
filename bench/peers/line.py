"""What the conductor and a rank say to one another: a line of JSON each, over a Unix socket.

Both sides block in a read while they have nothing to do, so a team that waits for its turn costs nothing.
"""

import json
import socket


class Line:
    def __init__(self, connected: socket.socket):
        self.socket = connected
        self.reader = connected.makefile("rb")

    @staticmethod
    def dial(path: str) -> "Line":
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        return Line(connected)

    def say(self, message: dict) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self):
        """None once the other side has hung up."""
        line = self.reader.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def hang_up(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was gone already
        self.reader.close()
        self.socket.close()
