"""Tables in Markdown and in LaTeX."""

from __future__ import annotations

from ssmscope.render.table import MAX_CELL_CHARACTERS, WORST, Table
from ssmscope.render.tokens import shorten, visible

LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
    **{"Δ": r"$\Delta$", "λ": r"$\lambda$", "ρ": r"$\rho$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"},
    **{"→": r"$\rightarrow$", "−": "$-$", "–": "--", "—": "---", "…": r"\ldots{}", "±": r"$\pm$", "∞": r"$\infty$"},
    **{"≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$", "″": "''", "₂": "$_2$", "“": "``", "”": "''"},
}
SUBSCRIPTS = {"A_MoRF": r"$A_{\mathrm{MoRF}}$", "A_LeRF": r"$A_{\mathrm{LeRF}}$"}


def to_markdown(found: Table) -> str:
    """Return a table in Markdown: best values bold, the worst marked, intervals in brackets, the note below."""
    labels = len(found.heads)
    lines = [[*map(_for_markdown, (*found.heads, *found.columns))]]
    lines.append(["---"] * labels + ["---:" if number else "---" for number in found.numbers])
    for names, cells in found.rows:
        written = []
        for cell in cells:
            text = _for_markdown(cell.value)
            text = f"**{text}**" if cell.best else text
            written.append(" ".join(filter(None, (text, WORST * cell.worst, cell.interval))))
        lines.append([*map(_for_markdown, names), *written])
    note = f"\n{_for_markdown(found.remarks)}\n" if found.remarks else ""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + note


def to_latex(found: Table, *, plain: bool = False) -> str:
    """Return a booktabs tabular: best values bold, the worst underlined, small intervals, the note as a comment.

    Every character that TeX would act on is escaped.

    Args:
        plain: True for the tabular alone, with intervals in full size and a rule wherever the first label changes.
    """
    aligned = "".join("r" if number else "l" for number in found.numbers)
    interval = " %s" if plain else r" {\scriptsize %s}"
    body, before = "", None
    for names, cells in found.rows:
        written = []
        for cell in cells:
            text = for_latex(cell.value)
            text = rf"\textbf{{{text}}}" if cell.best else text
            text = rf"\underline{{{text}}}" if cell.worst else text
            written.append(text + (interval % for_latex(cell.interval).removeprefix("{}") if cell.interval else ""))
        body += "\\midrule\n" if plain and len(names) > 1 and before not in (None, names[0]) else ""
        body += " & ".join([*map(for_latex, names), *written]) + " \\\\\n"
        before = names[0] if names else None
    top = " & ".join(map(for_latex, (*found.heads, *found.columns)))
    note = f"% {' '.join(visible(found.remarks).split())}\n" if found.remarks else ""
    above = "" if plain else f"% needs \\usepackage{{booktabs}}\n{note}"
    return (
        f"{above}\\begin{{tabular}}{{{'l' * len(found.heads)}{aligned}}}\n\\toprule\n"
        f"{top} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"
    )


def for_latex(text: str) -> str:
    """Escape a text for TeX; a bracket that begins a cell cannot become an argument of what precedes it."""
    known = text.removesuffix(" ↑").removesuffix(" ↓")
    if known in SUBSCRIPTS:
        return SUBSCRIPTS[known] + for_latex(text.removeprefix(known))
    escaped = "".join(LATEX.get(character, character) for character in shorten(visible(text), MAX_CELL_CHARACTERS))
    return f"{{}}{escaped}" if escaped.lstrip()[:1] in ("[", "*") else escaped


def _for_markdown(text: str) -> str:
    kept = shorten(visible(text), MAX_CELL_CHARACTERS)
    return "".join(f"\\{character}" if character in r"\`*_{}[]<>|" else character for character in kept)
