"""Files that somebody might hand to a verb by mistake or by malice: one of each kind that a reader meets."""

import io
import json
import os
import sqlite3
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

DEEP = 100_000
"""Levels of brackets, more than Python's stack has."""
LABELLED = {"text": "a good film", "label": 0}
ASKED = {"context": "Alma went to the attic .", "question": "Where is Alma ?", "answer": "attic"}

NOT_TEXT = {
    "empty": b"", "blank": b" \n\n\t\n", "bom": b"\xef\xbb\xbf", "nul": b"a good\0film\na bad film\n",
    "zeros": bytes(4096), "latin": "a café\n".encode("latin-1") * 3,
    "mixed": "a café\n".encode() + "a café\n".encode("latin-1"), "surrogate-bytes": b"a good \xed\xa0\x80 film\n",
    "utf16": "text,label\na good film,0\n".encode("utf-16"),
    "utf16-be": b"\xfe\xff" + "a good film\n".encode("utf-16-be"), "utf32": "a good film\n".encode("utf-32"),
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
}  # fmt: skip
"""Bytes that are not text in UTF-8, or hold none."""


def jsonl(base: dict[str, object], field: str) -> dict[str, bytes]:
    """Return lines of JSON with something wrong in or about `field`, after one line that is right."""

    def lines(*rows: object) -> bytes:
        return "\n".join(json.dumps(row) for row in (base, *rows)).encode()

    name = json.dumps(field).encode()
    whole = json.dumps(base).encode()
    return {
        "surrogate": lines({**base, field: "a \ud800 film"}),
        "surrogate-pair-reversed": lines({**base, field: "\udc00\ud800"}), "null-line": lines(None),
        "null-field": lines({**base, field: None}), "number-line": lines(5), "list-line": lines([1, 2]),
        "list-field": lines({**base, field: ["a", "b"]}), "object-field": lines({**base, field: {"a": 1}}),
        "flag-field": lines({**base, field: True} if field != "label" else {**base, "text": True}),
        "absent-field": lines({key: value for key, value in base.items() if key != field}), "cut": whole[:-3],
        "deep": whole + b"\n" + b"[" * DEEP,
        "deep-field": whole + b"\n{" + name + b": " + b"[" * DEEP + b"]" * DEEP + b"}",
        "deep-object": whole + b"\n" + b'{"a":' * DEEP, "twice": whole[:-1] + b", " + name + b': "another"}',
        "digits": whole + b"\n{" + name + b": " + b"9" * 5000 + b"}", "nan-line": whole + b"\nNaN",
        "escaped-nul": lines({**base, field: "\0"} if field != "label" else {**base, "label": ""}),
    }  # fmt: skip


def csv(comma: str) -> dict[str, bytes]:
    def table(*rows: str) -> bytes:
        return "\n".join(rows).replace(",", comma).encode()

    return {
        "header-only": table("text,label", ""),
        "no-header": table("a good film,0", "a bad film,1"),
        "extra": table("text,label", "a good film,0", "a film, which is bad,1"),
        "twice": table("text,label,text", "a good film,0,a bad film"),
        "label-twice": table("label,text,label", "0,a good film,1"),
        "short": table("label,text", "0"),
        "nul": b"text" + comma.encode() + b"label\na \0 film" + comma.encode() + b"0\n",
        "blank-label": table("text,label", "a good film, "),
        "other-columns": table("sentence,class", "a good film,0"),
    }


CSV_ONLY = {
    "unclosed": b'text,label\n"a good film,0\na bad film,1\n',
    "field": b'text,label\n"' + b"a film " * 40_000 + b'",0\n',
    "after-quote": b'text,label\n"a good" film,0\n',
}


def parquet() -> Iterator[tuple[str, bytes]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def table(columns: list[pa.Array], names: list[str]) -> bytes:
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_arrays(columns, names=names), buffer)
        return buffer.getvalue()

    texts, labels = pa.array(["a good film", "a bad film"]), pa.array([0, 1])
    both = ["text", "label"]
    good = table([texts, labels], both)
    yield "magic", b"PAR0" + good[4:-4] + b"PAR0"
    yield "cut", good[: len(good) // 2]
    yield "footer-length", good[:-8] + struct.pack("<I", 2**31) + b"PAR1"
    yield "middle-damaged", good[:8] + bytes(20) + good[28:]
    yield "text-lists", table([pa.array([["a"], ["b", "c"]]), labels], both)
    yield "text-nested", table([pa.array([{"a": 1}, {"a": 2}]), labels], both)
    yield "text-binary", table([pa.array([b"a\xff", b"b"]), labels], both)
    yield "text-null", table([pa.nulls(2, pa.string()), labels], both)
    yield "text-null-type", table([pa.nulls(2), labels], both)
    yield "text-numbers", table([pa.array([1, 2]), labels], both)
    yield "label-lists", table([texts, pa.array([[0], [1]])], both)
    yield "label-binary", table([texts, pa.array([b"0", b"1"])], both)
    yield "label-null", table([texts, pa.nulls(2)], both)
    yield "label-nan", table([texts, pa.array([0.0, float("nan")])], both)
    yield "label-nested", table([texts, pa.array([{"a": 0}, {"a": 1}])], both)
    yield "no-rows", table([pa.array([], pa.string()), pa.array([], pa.int64())], both)
    yield "no-columns", table([pa.array([1, 2])], ["number"])
    yield "twice", table([texts, labels, labels], ["text", "label", "label"])
    invalid = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe")]
    )
    yield "invalid-utf8", table([invalid, pa.array([0])], both)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": pa.nulls(11_000_000)}), buffer)
    yield "many-rows", buffer.getvalue()


def png(width: int, height: int, rows: bytes | None = None, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG of this size by its header; without rows its pixels are missing."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = b"" if rows is None else chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")


def images() -> dict[str, bytes]:
    small = png(8, 8, (b"\0" + bytes(24)) * 8)
    return {
        "text": b"no image at all", "cut": small[:40], "damaged": small[:45] + bytes(10) + small[55:],
        "no-pixels": png(8, 8), "bomb": png(60_000, 60_000, bytes(1000)), "large": png(12_000, 12_000, bytes(1000)),
        "zero": png(0, 0, b""), "size": png(9, 7, (b"\0" + bytes(27)) * 7),
        "deep-grey": png(8, 8, (b"\0" + bytes(16)) * 8, depth=16, colour=0),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n",
        "jpeg": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00", "gif": b"GIF89a" + bytes(10),
        "tiff": b"II*\x00\x08\x00\x00\x00\xff\xff" + bytes(30),
    }  # fmt: skip


def archives() -> Iterator[tuple[str, bytes]]:
    """Files that end in .npz and hold no word vectors."""
    import numpy as np

    def packed(**members: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(f"{name}.npy", content)
        return buffer.getvalue()

    def array(values: object) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=True)
        return buffer.getvalue()

    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 300), }\n"
    huge = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    words, vectors = array(np.array(["good", "bad"])), array(np.ones((2, 3), np.float32))
    good = packed(words=words, vectors=vectors)
    yield "cut", good[:60]
    yield "damaged", good[:50] + bytes(30) + good[80:]
    yield "one-array", packed(words=words)
    yield "objects", packed(words=words, vectors=array(np.array([{}, {}], dtype=object)))
    yield "huge", packed(words=words, vectors=huge)
    yield "not-numpy", packed(words=b"no array", vectors=b"")
    yield "nan", packed(words=words, vectors=array(np.full((2, 3), np.nan, np.float32)))
    yield "no-words", packed(words=array(np.array([], dtype="U1")), vectors=array(np.ones((0, 3), np.float32)))


VECTORS = {
    "nan": b"good 1 2 nan\nbad 1 2 3\n",
    "ragged": b"good 1 2 3\nbad 1 2\n",
    "no-numbers": b"good film\n",
    "beyond": b"good 1e999 1\n",
}


def directions() -> Iterator[tuple[str, bytes]]:
    """Files that are no control vectors, or of another model."""
    import torch
    from safetensors.torch import save

    fits, about = {"direction.0": torch.ones(64)}, {"site": "residual", "layer": "0"}
    whole = save(fits, about)
    yield "cut", whole[:-9]
    yield "header-length", struct.pack("<Q", 2**40) + whole[8:]
    yield "header", struct.pack("<Q", 9) + b"[" * 9
    yield "no-metadata", save(fits)
    yield "no-tensors", save({}, about)
    yield "other-names", save({"weight": torch.ones(64)}, about)
    yield "gap", save({"direction.1": torch.ones(64)}, about)
    yield "width", save({"direction.0": torch.ones(1)}, about)
    yield "matrix", save({"direction.0": torch.ones(64, 1)}, about)
    yield "two", save({f"direction.{at}": torch.ones(64) for at in range(2)}, about)
    yield "zero-sized", save({"direction.0": torch.ones(0)}, about)
    yield "nan", save({"direction.0": torch.full((64,), float("nan"))}, about)
    yield "flags", save({"direction.0": torch.ones(64, dtype=torch.bool)}, about)
    for key, values in {"site": ("logits", ""), "layer": ("999", "-1", "1.5", "9" * 5000)}.items():
        for value in values:
            yield f"{key}-{value[:9]}", save(fits, {**about, key: value})


SYNONYMS = {
    "deep": b"[" * DEEP, "null": b"null", "list": b'["good"]', "numbers": b'{"good": [1, 2]}',
    "word": b'{"good": "fine"}', "surrogate": b'{"good": ["\\ud800"]}', "surrogate-word": b'{"\\ud800": ["good"]}',
    "digits": b'{"good": ' + b"9" * 5000 + b"}", "nothing": b"{}", "twice": b'{"good": ["fine"], "good": ["bad"]}',
}  # fmt: skip


def databases(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Damaged files of kept answers."""

    def made(*commands: str, rows: list[tuple[object, ...]] | None = None) -> bytes:
        path = folder / "made.sqlite"
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            for command in commands:
                connection.execute(command)
            if rows:
                connection.executemany("INSERT INTO rows VALUES (?, ?, ?)", rows)
        connection.close()
        content = path.read_bytes()
        path.unlink()
        return content

    mark = f"PRAGMA application_id = {0x73736D65}"
    table = "CREATE TABLE rows (key BLOB PRIMARY KEY, seconds REAL NOT NULL, scores BLOB NOT NULL) WITHOUT ROWID"
    good = made(mark, table, rows=[(bytes([at]) * 16, 0.1, bytes(16)) for at in range(200)])
    yield "garbage", b"no database" * 400
    yield "cut", good[: len(good) // 2]
    yield "damaged", good[:100] + b"\xff" * 2000 + good[2100:]
    yield "other", made("CREATE TABLE other (x)")
    yield "other-columns", made(mark, "CREATE TABLE rows (x)")
    yield "no-table", made(mark, "CREATE TABLE other (x)")
    yield "view", made(mark, "CREATE TABLE other (x)", "CREATE VIEW rows AS SELECT x FROM other")


def folders(root: Path) -> dict[str, Path]:
    """Paths that are not regular files."""
    root.mkdir(parents=True, exist_ok=True)
    directory = root / "directory"
    directory.mkdir(exist_ok=True)
    for name in ("dangling", "loop"):
        if not os.path.lexists(root / name):
            (root / name).symlink_to(root / ("loop" if name == "loop" else "nowhere"))
    return {
        "directory": directory, "dangling": root / "dangling", "loop": root / "loop", "absent": root / "absent",
        "long": root / ("x" * 5000), "below-a-file": Path(__file__) / "file",
    }  # fmt: skip
