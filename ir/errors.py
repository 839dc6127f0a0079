"""Errors that a person can act on: what is wrong, where, what was got and expected, and what to do."""


class TangramError(Exception):
    """Wrong input or a product that cannot be right; the command line prints it as one line and exits with 2.

    Args:
        what: the fault, in a few words ("retention ratio is out of range").
        where: file, key, layer or group in which it stands; empty when `what` says it.
        got: the value found.
        expected: what would have been right.
        fix: what the reader should do, as a sentence; empty when `expected` says it.
    """

    def __init__(self, what: str, *, where: str = "", got: object = None, expected: str = "", fix: str = "") -> None:
        self.what, self.where, self.got, self.expected, self.fix = what, where, got, expected, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        details = [f"got {self.got}"] if self.got is not None else []
        details += [f"expected {self.expected}"] if self.expected else []
        line += f": {', '.join(details)}" if details else ""
        line += f"; {self.fix}" if self.fix else ""
        return " ".join(line.split())


class CheckFailedError(TangramError):
    """A check failed or could not be made; the command line exits with 1."""


class VerifyError(CheckFailedError):
    """A product of the compiler breaks one of the invariants of `ir.verify`."""


class MismatchError(TangramError):
    """Two things that must belong together do not: a plan and a model, a profile and a model, a file and its hash."""
