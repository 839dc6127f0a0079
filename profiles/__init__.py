"""Calibration statistics: what a profile holds, its file form, and the profiles that ship."""

from .profile import FloatArray, Level, Profile, Sample, StatisticArray
from .profile_file import BUILTIN, check_fractions, check_profile, find_profile, load_profile, save_profile

__all__ = [
    "BUILTIN",
    "FloatArray",
    "Level",
    "Profile",
    "Sample",
    "StatisticArray",
    "check_fractions",
    "check_profile",
    "find_profile",
    "load_profile",
    "save_profile",
]
