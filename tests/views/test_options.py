"""Options of every verb: their values and defaults."""

from described import check
from ssmscope.api import analyses


def test_what_every_option_allows() -> None:
    """A verb's own tests refuse what depends on models and data; bounds, words and defaults are all here."""
    shown = []
    for name, analysis in sorted(analyses.analyses().items()):
        for option in analysis.options.values():
            allowed = "options of methods" if option.nested else option.allowed
            default = "required" if option.required else repr(option.default)
            shown.append(f"{name} {'/'.join(option.flags)}{f' {option.name}' * option.setting}: {allowed}; {default}")
    check("options", shown)
