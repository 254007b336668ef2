"""A cable that delays and drops: passes frames between two network devices, where the kernel has no netem.

`python slow_link.py DEVICE DEVICE DELAY_S JITTER_S LOSS SEED` runs where both devices are (`ip netns exec`), until its input ends. A line of
input is another share of frames to drop, `1` cuts the cable. At its end it prints JSON: frames passed, frames dropped.
"""

import heapq
import json
import random
import select
import socket
import sys
import time

PROMISCUOUS = 1
ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP, PACKET_VNET_HDR = 1, 15
PACKET_OUTGOING = 4
MAX_FRAME = 1 << 17


def end_of_cable(device: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    # Each frame comes with what the sender left to its device, checksums above all, and is handed on with it.
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    end.bind((device, 0))
    index = socket.if_nametoindex(device)
    end.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, index.to_bytes(4, sys.byteorder) + PROMISCUOUS.to_bytes(2, sys.byteorder) + bytes(10))
    end.setblocking(False)
    return end


def run(devices: list[str], delay_s: float, jitter_s: float, loss: float, seed: int) -> dict[str, int]:
    ends = [end_of_cable(device) for device in devices]
    draw = random.Random(seed)
    # When a frame arrives, its place in the order of sending, where it goes.
    under_way: list[tuple[float, int, int, bytes]] = []
    counts = {"passed": 0, "dropped": 0}
    last = [0.0, 0.0]
    sent = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], wait_s)
        for side, end in enumerate(ends):
            if end not in ready:
                continue
            frame, address = end.recvfrom(MAX_FRAME)
            if address[2] == PACKET_OUTGOING:
                continue  # what this program sent itself
            if draw.random() < loss:
                counts["dropped"] += 1
                continue
            # Frames of one direction do not overtake each other, as on a cable.
            last[side] = max(last[side], time.monotonic() + delay_s + jitter_s * draw.uniform(-1, 1))
            heapq.heappush(under_way, (last[side], sent, 1 - side, frame))
            sent += 1
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return counts
            loss = float(line)
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, side, frame = heapq.heappop(under_way)
            ends[side].send(frame)
            counts["passed"] += 1


if __name__ == "__main__":
    delay, jitter, share = map(float, sys.argv[3:6])
    sys.stdout.write(json.dumps(run(sys.argv[1:3], delay, jitter, share, int(sys.argv[6]))))
