#!/usr/bin/env python3
"""Writes the UCI handwritten digits, as scikit-learn ships them, as IDX files beside this script.

Needs scikit-learn (made with 1.9.1); the result is the same with every version, since the data never changes:

    python3 -m venv venv && venv/bin/pip install scikit-learn && venv/bin/python convert.py
"""

import pathlib
import struct

from sklearn.datasets import load_digits

HERE = pathlib.Path(__file__).resolve().parent
UNSIGNED_BYTE = 0x08


def write_idx(name, extents, values):
    """One IDX file: two zero bytes, the element type, the number of extents, the extents, the elements."""
    header = struct.pack(">BBBB", 0, 0, UNSIGNED_BYTE, len(extents)) + struct.pack(f">{len(extents)}I", *extents)
    (HERE / name).write_bytes(header + bytes(values))


def main():
    digits = load_digits()
    images = digits.images.astype("uint8")
    labels = digits.target.astype("uint8")
    assert images.shape == (1797, 8, 8) and images.max() == 16 and (images == digits.images).all()
    # Every fifth image is for testing: the file is ordered by writer, so that both parts see every hand.
    test = [index for index in range(len(labels)) if index % 5 == 0]
    train = [index for index in range(len(labels)) if index % 5 != 0]
    for prefix, chosen in (("train", train), ("t10k", test)):
        write_idx(f"{prefix}-images-idx3-ubyte", (len(chosen), 8, 8), images[chosen].tobytes())
        write_idx(f"{prefix}-labels-idx1-ubyte", (len(chosen),), labels[chosen].tobytes())
        print(f"{prefix}: {len(chosen)} images")


if __name__ == "__main__":
    main()
