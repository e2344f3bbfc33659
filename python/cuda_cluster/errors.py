"""Errors, with the program's messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Where the program read a mapping (`program.SpecFiles`), with a line and a column that its author
#: has not seen.
_MAPPING = re.compile(r"/proc/self/fd/\d+(:\d+:\d+)?")

#: How the program's reader of flags refuses one's value; here flags are keywords.
_FLAG = re.compile(r"invalid value '(.*)' for '--([a-z-]+)(?: <[^>]*>)?': ")
_SEE_HELP = "\nFor more information, try '--help'."


def _of_keywords(text: str) -> str:
    """The program's words for who has given keywords."""
    text = _FLAG.sub(lambda found: f"{found[2].replace('-', '_')}={found[1]!r}: ", text)
    return _MAPPING.sub("spec", text).removesuffix(_SEE_HELP)


class ClusterError(RuntimeError):
    """The program refused a request, or a cluster failed. The text has the cause and a hint."""

    def __init__(
        self,
        message: str,
        *,
        causes: Sequence[str] = (),
        hint: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        lines = [message, *(f"caused by: {cause}" for cause in causes)]
        if hint:
            lines.append(f"hint: {hint}")
        super().__init__("\n".join(lines))
        self.message = message
        self.causes = list(causes)
        self.hint = hint
        #: The program's exit code: 2 for wrong input, 3 for not ready in time, 4 not verified.
        self.exit_code = exit_code

    @classmethod
    def from_text(cls, text: str, exit_code: int | None) -> ClusterError:
        """Parses the program's standard error: `error: …`, `caused by: …`, `hint: …`."""
        message: list[str] = []
        causes: list[str] = []
        hint: str | None = None
        for line in text.splitlines():
            word, _, rest = line.strip().partition(": ")
            if word == "error":
                message = [rest]
            elif word == "caused by" and message:
                causes.append(rest)
            elif word == "hint" and message:
                hint = rest
            elif message and line.strip():
                (causes if causes else message)[-1] += "\n" + line
        if not message:
            message = [text.strip() or f"cuda-cluster ended with exit code {exit_code}"]
        return cls.of("\n".join(message), causes=causes, hint=hint, exit_code=exit_code)

    @classmethod
    def of(
        cls,
        message: str,
        *,
        causes: Sequence[str] = (),
        hint: str | None = None,
        exit_code: int | None = None,
    ) -> ClusterError:
        """An error of the kind that the exit code means: 2 is wrong input."""
        kind = WrongInput if exit_code == 2 else cls
        message, *causes = map(_of_keywords, (message, *causes))
        return kind(message, causes=causes, hint=hint, exit_code=exit_code)


class WrongInput(ClusterError, ValueError):
    """A request is wrong, contradicts itself, or does not fit the machine."""


class ProgramNotFound(ClusterError):
    """The `cuda-cluster` program was not found."""


class NotBound(ClusterError):
    """This process was not bound to what is near its GPU, and nothing of it has changed."""
