"""Regions and windows: those that are read, and those refused with the length that they must fit."""

from __future__ import annotations

import pytest

from ssmscope.attacks.position.regions import Region, regions_of, windows_of
from ssmscope.errors import InputError


def test_regions_in_tokens_and_in_percent():
    assert regions_of("0:32, 5%:12.5%", 100) == (Region(0, 32), Region(5, 12.5, True))
    assert regions_of([(0, 32), "90%:100%"], 100) == (Region(0, 32), Region(90, 100, True))
    assert [str(region) for region in regions_of("0:32,5%:12.5%", 100)] == ["0:32", "5%:12.5%"]
    assert str(*regions_of("1048575:1048576", 2**21)) == "1048575:1048576"
    assert str(windows_of("0.1%", "0.3%", 2000)[1]) == "0.3%:0.4%"


def test_shares_are_whole_tokens_and_never_none():
    assert Region(0, 10, True).bounds(100) == (0, 10) and Region(32.3, 64.6, True).bounds(1000) == (323, 646)
    assert Region(0, 10, True).bounds(7) == (0, 1) and Region(90, 100, True).bounds(7) == (6, 7)
    assert Region(25, 75, True).bounds(10) == (2, 7) and Region(99, 100, True).bounds(1) == (0, 1)
    for length in (1, 2, 3, 10, 97, 1024):
        tiles = [Region(5 * i, 5 * i + 5, True).bounds(length) for i in range(20)]
        assert tiles[0][0] == 0 and tiles[-1][1] == length and all(a < b <= length for a, b in tiles)
        assert length < 20 or all(one[1] == two[0] for one, two in zip(tiles, tiles[1:]))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "'' is not a region; write start:stop in tokens, 0:32, or in percent"),
        ([], "no region was given"),
        ("0-32", "'0-32' is not a region"),
        ("0:32,", "'' is not a region"),
        ("0%:32", "'0%:32' is not a region"),
        ("1.5:3", "region 1.5:3 is not in whole tokens"),
        ("3:3", "region 3:3 is empty or not within 0 to 100, the tokens of the longest sequence"),
        ("5:2", "region 5:2 is empty"),
        ("-4:2", "region -4:2 is empty or not within 0 to 100"),
        ("90:101", "region 90:101 is empty or not within 0 to 100"),
        ("50%:101%", "region 50%:101% is empty or not within 0 to 100 %"),
        ([(0, 5), "0:5"], "region 0:5 was given twice"),
        ([(0, 5, 7)], "'0:5:7' is not a region"),
    ],
)
def test_refused_regions(given, says):
    with pytest.raises(InputError, match=says) as caught:
        regions_of(given, 100)
    assert "\n" not in str(caught.value)


def test_windows():
    assert windows_of(4, None, 12) == (Region(0, 4), Region(4, 8), Region(8, 12))
    assert windows_of("4", "3", 12) == (Region(0, 4), Region(3, 7), Region(6, 10), Region(8, 12))
    assert windows_of(12, 1, 12) == (Region(0, 12),)
    tenths = windows_of("10%", None, 12)
    assert len(tenths) == 10 and tenths[-1] == Region(90, 100, True)
    assert len(windows_of("20%", "0.1%", 1000)) == 801


@pytest.mark.parametrize(
    ("window", "stride", "says"),
    [
        (0, None, "window is 0; allowed is a whole number of tokens from 1 on, or a share such as 10%"),
        ("many", None, "window is 'many'"),
        ("1.5", None, "window is '1.5'"),
        (-1, None, "window is -1"),
        (4, 0, "stride is 0"),
        (13, None, "window 13 is longer than the longest sequence, of 12 tokens"),
        ("120%", None, "window 120% is longer"),
        ("10%", 4, "window 10% and stride 4: give both in tokens or both in percent"),
    ],
)
def test_refused_windows(window, stride, says):
    with pytest.raises(InputError, match=says):
        windows_of(window, stride, 12)
