"""The README's pictures, from models that ship: `python docs/pictures.py` draws them anew into docs/figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ssmscope
from ssmscope.api.results import Result
from ssmscope.render.pictures import encode_figure

FIGURES = Path(__file__).parent / "figures"
MODEL = "demo/sst2-mamba2"
TEXT = "A gripping, beautifully acted film, though the ending feels a little rushed."


def heatmap() -> Result:
    return ssmscope.heatmap(ssmscope.load(MODEL), TEXT)


def explanation() -> Result:
    return ssmscope.explain(ssmscope.load(MODEL), TEXT, methods=["lrp", "gradxinput"])


def patched() -> Result:
    other = TEXT.replace("gripping, beautifully", "tedious, clumsily")
    return ssmscope.patch(ssmscope.load(MODEL), clean=TEXT, corrupted=other)


PICTURES: dict[str, Callable[[], Result]] = {
    "readme-heatmap": heatmap,
    "readme-explain": explanation,
    "readme-patch": patched,
}


def main(folder: Path = FIGURES) -> None:
    for name, measure in PICTURES.items():
        (folder / f"{name}.png").write_bytes(encode_figure(measure().figure(), "png"))


if __name__ == "__main__":
    main()
