"""Entries of `ssmscope.attacks`, of the form of a package's entry points."""

ORDER = 3
"""Place of the room's analyses in the help."""
_HERE = "ssmscope.attacks"
ENTRIES = {
    "ssmscope.analyses": {
        "effect": f"{_HERE}.effect:attack_effect",
        "insertion": f"{_HERE}.insertion:insertion_sweep",
        "noise": f"{_HERE}.noise:character_noise",
        "overflow": f"{_HERE}.overflow:state_overflow",
        "poison": f"{_HERE}.poisoning:state_poisoning",
        "position": f"{_HERE}.position:position_bias",
        "prompts": f"{_HERE}.prompts:prompt_attack",
        "words": f"{_HERE}.words:word_attack",
    },
    "ssmscope.attacks": {
        name: f"{_HERE}.recipes:{name}"
        for name in ("stresstest", "checklist", "deepwordbug", "textbugger", "textfooler", "bertattack", "pwws")
    },
}
