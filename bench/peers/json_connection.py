"""Messages between the driver and a rank: lines of JSON over a Unix socket.

Both sides block in a read while they have nothing to do, so a team that waits for its turn costs nothing.
"""

import json
import socket


class JsonConnection:
    def __init__(self, connected: socket.socket):
        self.socket = connected
        self.reader = connected.makefile("rb")

    @staticmethod
    def dial(path: str) -> "JsonConnection":
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        return JsonConnection(connected)

    def send(self, message: dict) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self):
        """The next message; None once the other side has closed the connection."""
        line = self.reader.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def hang_up(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has closed it before
        self.reader.close()
        self.socket.close()
