"""Hostile clients: connections that never authenticate, made by processes of their own."""

import multiprocessing
import os
import selectors
import socket
import time

PROCESSES = 4
ADDRESSES = 100
# Seconds between two bytes of a dripping client.
DRIP_S = 1.0
# Seconds between two attempts of a client whose connection was closed.
RETURN_S = 0.05

JOB = "/v1/jobs/" + "0" * 32


def head(path: str, length: int) -> bytes:
    return (f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\n\r\n").encode()


def hello() -> bytes:
    """A Hello (docs/protocol.md) of a job that the hub does not know."""
    return b"PHUB" + bytes([1, 0]) + bytes(2 + 4 + 4) + bytes(range(16)) + bytes(16 + 32) + os.urandom(32)


# For each kind its first bytes to the manager, its first bytes to a data port, and whether single bytes follow.
KINDS = {
    "silent": (b"", b"", False),
    "half-open": (b"POST /v1/jobs HTTP/1.1\r\nhost: local", hello()[:50], False),
    "promised": (head(JOB + "/init", 512 << 20), hello(), False),
    "dripping": (head(JOB + "/init", 512 << 20), hello()[:20], True),
    "large": (head(JOB + "/init", 512 << 20) + b" " * (1 << 20), hello() + bytes(1 << 20), False),
    "reports": (head("/v1/hubs/0/events", 4 << 20) + b" " * (1 << 20), hello()[:111], False),
    "readers": (b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n", hello(), False),
}


class HostileClients:
    """A context that keeps so many connections to both ports."""

    def __init__(self, kind: str, manager: tuple[str, int], data: tuple[str, int], clients: int, many: bool):
        self.clients = clients
        self.quit = multiprocessing.Event()
        self.counts = [multiprocessing.Value("q", 0) for _ in range(PROCESSES)]
        self.processes = [
            multiprocessing.Process(
                target=_run_clients,
                args=(kind, manager, data, range(number, clients, PROCESSES), many, self.quit, count),
                daemon=True,
            )
            for number, count in enumerate(self.counts)
        ]

    def __enter__(self) -> "HostileClients":
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_) -> None:
        self.quit.set()
        for process in self.processes:
            process.join()

    def connections(self) -> int:
        """The number of connections that were made. A client whose connection was closed connects again and counts anew."""
        return sum(count.value for count in self.counts)

    def wait_until_all_have_connected(self) -> None:
        deadline = time.monotonic() + 120
        while self.connections() < self.clients and time.monotonic() < deadline:
            time.sleep(0.1)


def _run_clients(kind, manager, data, numbers, many, quit, count) -> None:
    to_manager, to_data, drips = KINDS[kind]
    selector = selectors.DefaultSelector()
    absent = [(0.0, number) for number in numbers]
    present = {}
    next_drip = time.monotonic() + DRIP_S
    while not quit.is_set():
        now = time.monotonic()
        due, absent = [item for item in absent if item[0] <= now], [item for item in absent if item[0] > now]
        for _, number in due:
            port, text = (manager, to_manager) if number % 2 else (data, to_data)
            connection = socket.socket()
            connection.setblocking(False)
            try:
                if many:
                    connection.bind((f"127.0.9.{1 + number % ADDRESSES}", 0))
                connection.connect(port)
            except BlockingIOError:
                pass
            except OSError:
                connection.close()
                absent.append((now + RETURN_S, number))
                continue
            present[connection] = (number, text)
            selector.register(connection, selectors.EVENT_WRITE)
        for key, events in selector.select(0.05):
            connection = key.fileobj
            number, text = present[connection]
            try:
                if events & selectors.EVENT_WRITE:
                    failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if failed:
                        raise OSError(failed)
                    count.value += 1
                    # Bytes that do not fit at once are not sent: the port has enough to hold.
                    if text:
                        connection.send(text)
                    is_reader = text.startswith(b"GET")
                    if is_reader:
                        # A reader never reads its answer, so it does not notice a closed connection. It connects again later.
                        selector.unregister(connection)
                        absent.append((now + 1, number))
                        present[connection] = (None, text)
                    else:
                        selector.modify(connection, selectors.EVENT_READ)
                    continue
                if connection.recv(4096):
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            selector.unregister(connection)
            connection.close()
            del present[connection]
            absent.append((now + RETURN_S, number))
        readers = [connection for connection, (number, _) in present.items() if number is None]
        for connection in readers[: max(0, len(readers) - len(numbers))]:
            connection.close()
            del present[connection]
        if drips and now >= next_drip:
            next_drip = now + DRIP_S
            for connection in present:
                try:
                    connection.send(b" ")
                except OSError:
                    pass
    for connection in present:
        connection.close()
