#!/usr/bin/env python3
"""Edits a small GGUF file in place: per-tensor scales become one, biases of q, k and v zero, keys get other values.

usage: edit_gguf.py FILE.gguf [KEY=NUMBER ...]   (needs the gguf package; NUMBER: a whole one)

llama.cpp loads both for every architecture, but the graphs of some multiply by no scale and add no bias: in such files
these stand for nothing.
"""
import re
import sys

import gguf

reader = gguf.GGUFReader(sys.argv[1], "r+")
for tensor in reader.tensors:
    if tensor.name.endswith(".scale"):
        tensor.data[:] = 1
    elif re.search(r"\.attn_[qkv]\.bias$", tensor.name):
        tensor.data[:] = 0
for assignment in sys.argv[2:]:
    key, number = assignment.split("=")
    field = reader.fields[key]
    field.parts[field.data[0]][0] = int(number)
