"""Entries of `ssmscope.probes`, of the form of a package's entry points."""

ORDER = 2
"""Place of the room's analyses in the help."""
_HERE = "ssmscope.probes"
ENTRIES = {
    "ssmscope.analyses": {
        "bound": f"{_HERE}.bound:generalization_bound",
        "checkpoints": f"{_HERE}.checkpoints:stability_table",
        "evaluate": f"{_HERE}.evaluate:evaluate",
        "influence": f"{_HERE}.influence:influence",
        "lens fit": f"{_HERE}.lens:fit_lens",
        "lens show": f"{_HERE}.lens:trajectory",
        "loss": f"{_HERE}.loss:token_loss",
        "parity": f"{_HERE}.parity:parity",
        "precision": f"{_HERE}.precision:precision",
        "retrieval": f"{_HERE}.retrieval:retrieval",
        "snr": f"{_HERE}.snr:needle_snr",
        "stability": f"{_HERE}.stability:stability",
        "states": f"{_HERE}.states:states",
    }
}
