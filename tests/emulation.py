"""CUDA kernels of `scans.nvrtc` on a CPU, for tests where there is no GPU: by a C++ compiler and `emulated.h`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from ssmscope.scans.nvrtc import MARKS, PLACES, ROOM, Launch, Launches, Program

NAN = 0x7FC00000  # as a float32
COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCE = """
#include "emulated.h"
static bool EXPECTED;
{sources}
static const Terms *terms;
static void (*const entries[])() = {{ {entries} }};
extern "C" void launch(int i, int expected, const Terms *given, unsigned blocks, unsigned threads, unsigned shared) {{
    terms = given, EXPECTED = expected;
    run_blocks(entries[i], blocks, threads, shared);
}}
"""


class Emulator:
    """Stands for `Program.launch`; a compilation, of a second or two, holds all entries of one cut of the work.

    Args:
        entries: of the program; they are compiled with EXPECTED as a variable.
        directory: for what is compiled.
    """

    def __init__(self, program: Program, entries: Sequence[str], directory: Path) -> None:
        self.program, self.entries, self.directory = program, entries, directory
        self.libraries: dict[tuple[str, ...], ctypes.CDLL] = {}
        self.room = torch.full((MARKS + ROOM,), NAN, dtype=torch.int32)
        self.room[:MARKS] = 0
        self.recording = False
        self.counted = 0  # launches whose blocks counted in the stream's memory

    def __call__(self, work: Launches, terms: Sequence[int], device: torch.device) -> None:
        if work.counted and not self.recording:
            held, *places = self.room, self.room.data_ptr() + 4 * MARKS, self.room.data_ptr()
            self.counted += 1
        else:
            held, *places = work.held(device)
            held[work.counted * MARKS :] = NAN
        structure = work.structure()
        work.terms.pack_into(structure, 0, *terms)
        PLACES.pack_into(structure, work.places, *places)
        for launch in work.launches:
            self.run(launch, bytes(structure))
        assert not work.counted or not held[:MARKS].any()

    def run(self, launch: Launch, terms: bytes) -> None:
        given = dict(one.split("=") for one in launch.defines)
        entry, expected = self.entries.index(given.pop("ENTRY")), int(given.pop("EXPECTED"))
        given.pop("BLOCKS")
        cut = tuple(f"-D{name}={value}" for name, value in given.items())
        if cut not in self.libraries:
            self.libraries[cut] = self.compiled(cut)
        self.libraries[cut].launch(entry, expected, terms, launch.blocks, launch.threads, launch.shared)

    def compiled(self, cut: tuple[str, ...]) -> ctypes.CDLL:
        made = self.directory / f"{''.join(cut)}.so"
        calls = ", ".join(f"[] {{ {entry}(*terms); }}" for entry in self.entries)
        options = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", f"-I{Path(__file__).parent}", *cut]
        sources = "\n".join(f'#include "{source}"' for source in self.program.sources)
        source = SOURCE.format(sources=sources, entries=calls)
        subprocess.run(
            [str(COMPILER), *options, "-x", "c++", "-", "-o", str(made)], input=source, text=True, check=True
        )
        return ctypes.CDLL(str(made))
