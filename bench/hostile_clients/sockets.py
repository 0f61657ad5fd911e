"""The bytes in the system's buffers for the connections at some local ports, from sock_diag(7)."""

import socket
import struct

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST_DUMP = 0x301
NLMSG_DONE = 3
INET_DIAG_SKMEMINFO = 7
HEADER = struct.Struct("=IHHII")
# struct inet_diag_msg: family, state, timer, retransmits; then the socket's id, which begins with its two ports.
MESSAGE_BYTES = 72
# struct inet_diag_req_v2: family, protocol, extensions, padding, states; then a socket's id.
REQUEST = struct.Struct("=BBBxI48s")
EVERY_STATE = 0xFFFFFFFF
# Indices in skmeminfo: bytes received and not read, bytes to be sent, other memory, and the backlog.
RMEM, WMEM, OPTMEM, BACKLOG = 0, 2, 6, 7


def bytes_at(ports: set[int]) -> int:
    """Bytes that connections with one of these local ports hold in both directions."""
    total = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        for port, memory in _sockets(family):
            if port in ports:
                total += memory[RMEM] + memory[WMEM] + memory[OPTMEM] + memory[BACKLOG]
    return total


def _sockets(family: int):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as link:
        request = REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_SKMEMINFO - 1), EVERY_STATE, bytes(48))
        link.send(HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            answer = link.recv(1 << 20)
            while answer:
                length, kind, *_ = HEADER.unpack_from(answer)
                if kind != SOCK_DIAG_BY_FAMILY:
                    if kind != NLMSG_DONE:
                        raise OSError("sock_diag does not list the sockets")
                    return
                yield _read(answer[HEADER.size : length])
                answer = answer[(length + 3) & ~3 :]


def _read(message: bytes) -> tuple[int, tuple[int, ...]]:
    (port,) = struct.unpack_from("!H", message, 4)
    attributes = message[MESSAGE_BYTES:]
    while attributes:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == INET_DIAG_SKMEMINFO:
            return port, struct.unpack_from(f"={(length - 4) // 4}I", attributes, 4)
        attributes = attributes[(length + 3) & ~3 :]
    return port, (0,) * 9
