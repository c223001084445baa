"""Values that a command line is fuzzed with: allowed ones, and forbidden ones."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image

NASTY = (
    "", " ", "\n", "\t\r\n", "-", "--", "---", "-1", "--text", "=", ",", ",,", ":", "%", "a:b", "0:0%", "5:1",
    "nan", "inf", "-inf", "1e400", "-0", "0x10", "1e3", "1.5", "٣", "9" * 5000, "None", "null", "true", "0", "1",
    "{", "{0}", "{content", "{content}", "{content} {content}", "{context}", "{context} {question}", "%s%n",
    "'\"`$(x)\\", "[bold]x[/bold]", "[/]", "<script>", "negative", "positive",
    "../..", "/", "/dev/null", "/etc/passwd", "~nouser", "~", ".", "a/b", "a/b/c", "demo/", "demo/sst2-mamba3", "//",
    "é" * 300, "a" * 5000, "a " * 700, "\u202eevoba\u202c", "שלום עולם", "مرحبا", "👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈",
    "e\u0301\u0301\u0301", "\x1b[31mred\x1b[0m", "\x07\x08\x7f", "\ufeffbom", "\u2028\u2029", "\udcff", "ok\udc80",
    "𝔘𝔫𝔦", "\U0010ffff", "ﬁlm", "İ", "ß" * 9, "\xad\u200b",
)  # fmt: skip
"""Texts that were wrong somewhere, or look as if they might be. A byte that is not UTF-8 reaches Python as a
surrogate."""

ARGUMENT = st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff")
"""What can stand in a command line: anything but the character that ends it."""

HOSTILE = st.sampled_from(NASTY) | st.text(ARGUMENT, max_size=12)
SMALL = st.integers(-2, 9).map(str)
WHOLE_NUMBERS = st.sampled_from(
    ("3000", "2147483648", "999999999999999999", "9223372036854775808", "-999999999999999999")
)
NUMBERS = st.floats(width=16).map(str) | st.sampled_from(
    ("0", "1", "-1", "1e-300", "1e300", "nan", "inf", "-inf", "1_0", "1e400")
)
LISTS = st.lists(SMALL, min_size=1, max_size=4).map(",".join)

WORDS = "a gripping dull film , . never starts Alma attic Where ? positive negative".split()
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join)
TEXTS = SENTENCES | HOSTILE

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    | st.sampled_from((0, 1, -1, 2**31, 10**9, math.nan, math.inf, "NaN", "", "0", "mamba", "float16", "__class__")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
DEEP = "[" * 3000 + "]" * 3000


@dataclass(frozen=True)
class Written:
    """A file that exists when the command runs."""

    name: str
    content: bytes

    def place(self, folder: Path) -> str:
        (folder / self.name).write_bytes(self.content)
        return str(folder / self.name)


@dataclass(frozen=True)
class Damaged:
    """A copy of a directory in which one file is another, or gone."""

    source: str
    file: str
    content: bytes | None

    def place(self, folder: Path) -> str:
        copy = folder / "damaged"
        copy.mkdir()
        for file in Path(self.source).iterdir():
            if file.name != self.file:
                (copy / file.name).write_bytes(file.read_bytes())
        if self.content is not None:
            (copy / self.file).write_bytes(self.content)
        return str(copy)


@dataclass(frozen=True)
class Folder:
    """An empty directory."""

    name: str

    def place(self, folder: Path) -> str:
        (folder / self.name).mkdir()
        return str(folder / self.name)


Value = str | Written | Damaged | Folder

BYTES = st.binary(max_size=40) | st.sampled_from(
    (
        b"", b"\n", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n\n\n", b"text,label\n", b"a" * 20_000, b"null", b"{}",
        b"[]", DEEP.encode(),
    )
)  # fmt: skip
CELLS = TEXTS | st.sampled_from(("nan", "NA", "3", "1.0", "True", "-1"))
LABELS = st.sampled_from(("positive", "negative", "0", "1", "2", "1.0", "", "neutral", "Positive", "nan"))


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


@st.composite
def tables(draw: st.DrawFn) -> Written:
    """A table of texts and labels in one of the formats that are read, with a row or header that is odd."""
    columns = draw(
        st.sampled_from((("text", "label"),) * 4 + (("text",), ("text", "text", "label"), ("label",), ("a", "")))
    )
    rows = draw(st.lists(st.tuples(*(LABELS if name == "label" else CELLS for name in columns)), max_size=6))
    kind = draw(st.sampled_from(("csv", "tsv", "jsonl", "txt", "CSV", "parquet", "xlsx")))
    if kind == "jsonl":
        lines = [json.dumps(dict(zip(columns, row))) for row in rows]
        lines += draw(st.lists(JSON.map(json.dumps), max_size=1))
    else:
        comma = "\t" if kind == "tsv" else ","
        quote = draw(st.sampled_from(('"', "", "'")))
        lines = [comma.join(f"{quote}{cell}{quote}" for cell in row) for row in (columns, *rows)]
        lines += draw(st.lists(st.just(comma * 3) | HOSTILE, max_size=1))
    return Written(f"table.{kind}", encoded(draw(st.sampled_from(("\n", "\r\n", "\r"))).join(lines)))


@st.composite
def plain_lines(draw: st.DrawFn) -> Written:
    lines = draw(st.lists(TEXTS, max_size=6))
    return Written(draw(st.sampled_from(("lines.txt", "lines", "lines.md"))), encoded("\n".join(lines)))


@st.composite
def json_files(draw: st.DrawFn) -> Written:
    suffix = draw(st.sampled_from(("json", "jsonl", "csv")))
    return Written(f"file.{suffix}", draw(JSON.map(lambda value: json.dumps(value).encode()) | BYTES))


@st.composite
def images(draw: st.DrawFn) -> Written:
    height, width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    mode = draw(st.sampled_from(("RGB", "L", "RGBA", "1", "P", "I;16", "CMYK")))
    stream = io.BytesIO()
    picture = Image.fromarray(np.zeros((height, width, 3), np.uint8)).convert("L" if mode == "I;16" else mode)
    picture.save(stream, format="JPEG" if mode == "CMYK" else "PNG")
    content = stream.getvalue()
    return Written("made.png", content[: draw(st.sampled_from((len(content), len(content) // 2, 9)))])


BINARY = BYTES.map(lambda content: Written("file.bin", content)) | BYTES.map(
    lambda content: Written("file.csv", content)
)
FILES = tables() | plain_lines() | json_files() | images() | BINARY | st.just(Folder("folder"))


@st.composite
def damaged(draw: st.DrawFn, sources: Sequence[str]) -> Damaged:
    """A model's or a lens's directory with one file cut short, overwritten, changed at one place, or gone."""
    source = draw(st.sampled_from([one for one in sources if Path(one).is_dir()]))
    files = sorted(Path(source).iterdir(), key=lambda file: (file.name != "config.json", file.name))
    file = draw(st.sampled_from(files))
    content: bytes | None = file.read_bytes()
    assert content is not None
    how = draw(st.sampled_from(("field", "field", "field", "cut", "bytes", "flip", "gone")))
    if how == "field" and file.suffix == ".json":
        content = json.dumps(draw(changed(json.loads(content)))).encode()
    elif how == "cut":
        content = content[: draw(st.integers(0, len(content)))]
    elif how == "bytes":
        content = draw(BYTES)
    elif how == "gone":
        content = None
    else:
        at = draw(st.integers(0, min(len(content) - 1, 200)))
        content = content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at + 1 :]
    return Damaged(source, file.name, content)


@st.composite
def changed(draw: st.DrawFn, document: object) -> object:
    """A JSON document with another value at one place."""
    if isinstance(document, dict) and document and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(document)))
        how = draw(st.sampled_from(("deeper", "deeper", "deeper", "drop", "add")))
        if how == "drop":
            return {name: value for name, value in document.items() if name != key}
        if how == "add":
            return {**document, draw(st.text(max_size=6)): draw(JSON)}
        return {**document, key: draw(changed(document[key]))}
    if isinstance(document, list) and document and draw(st.booleans()):
        at = draw(st.integers(0, len(document) - 1))
        return [*document[:at], draw(changed(document[at])), *document[at + 1 :]]
    return draw(JSON)
